"""What may stand in a file that another program reads: paths, names and addresses.

A path can hold anything but a null byte, and a newline or a quote in one ends what it stands in. So
what a grammar has an escape for is escaped, and what is left is refused in words.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9/._+@=,:-]+")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def printable(text: str | Path) -> str:
    """A text without control characters; others are refused."""
    text = str(text)
    if not text.isprintable():
        raise ValueError(
            f"{text!r} has a character that cannot be printed (a newline?), which can end what it "
            "is written into: rename it"
        )
    return text


def toml(text: str | Path) -> str:
    """A string of TOML. JSON's is one, but for control characters."""
    return json.dumps(printable(text), ensure_ascii=False)


def plain(text: str | Path) -> str:
    """A text that means itself to nginx, systemd, Docker and Flower alike; others are refused."""
    text = str(text)
    if not _PLAIN.fullmatch(text):
        raise ValueError(
            f"{text!r} may have letters without accents, digits and /._+@=,:- alone, because "
            "others mean something to the program that reads it: rename it"
        )
    return text


def host(text: str) -> str:
    """A name or an address of a machine, without a port."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if len(text) > 253 or not all(map(_LABEL.fullmatch, text.split("."))):
            raise ValueError(
                f"{text!r} is no name or address of a machine; expected fl.example or 10.0.0.1"
            ) from None
        return text


def address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, apart; an IPv6 address stands in brackets."""
    name, _, number = text.rpartition(":")
    if not (name and number.isascii() and number.isdigit() and 0 < int(number) < 65536):
        raise ValueError(f"{text!r} is no address; expected HOST:PORT, as in fl.example:443")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        if ":" not in name:
            raise ValueError(f"{text!r}: only an IPv6 address stands in brackets")
    elif ":" in name:
        raise ValueError(f"{text!r}: put an IPv6 address into brackets, as in [::1]:443")
    return host(name), int(number)


def joined(name: str, port: int) -> str:
    """``HOST:PORT`` again."""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
