"""Messages as bytes: typed, with lengths, one encoding for one value.

Whatever is signed, hashed, derived from or kept goes through :func:`encode`, with a label of its
own in front. Only Python's own library is needed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Invalid(ValueError):  # noqa: N818 - it is about what was received
    """Something received is not what the protocol says; the text says what."""


def encode(value: Any) -> bytes:
    """A value as bytes, the same for equal values alone.

    A letter for the type, eight bytes for the length or the number of entries, then what there is:

        b bytes    s text in UTF-8    i whole number, two's complement, as short as it can be
        f float of eight bytes    t one byte: true or false    n nothing
        l entries of a list or tuple    d keys and values of a dictionary, by the keys' bytes
    """
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    kind = type(value)
    if kind is bytes:
        yield b"b" + len(value).to_bytes(8, "big")
        yield value
    elif kind is str:
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise Invalid("there is a text that cannot be encoded.") from None
        yield b"s" + len(text).to_bytes(8, "big") + text
    elif kind is int:
        length = (value + (value < 0)).bit_length() // 8 + 1
        yield b"i" + length.to_bytes(8, "big") + value.to_bytes(length, "big", signed=True)
    elif kind is float:
        yield b"f" + (8).to_bytes(8, "big") + struct.pack(">d", value)
    elif kind is bool:
        yield b"t" + (1).to_bytes(8, "big") + bytes([value])
    elif value is None:
        yield b"n" + bytes(8)
    elif kind is list or kind is tuple:
        yield b"l" + len(value).to_bytes(8, "big")
        for one in value:
            yield from _pieces(one)
    elif isinstance(value, Mapping):
        yield b"d" + len(value).to_bytes(8, "big")
        for key, one in sorted((encode(key), one) for key, one in value.items()):
            yield key
            yield from _pieces(one)
    else:
        raise Invalid(f"a message cannot hold a {kind.__name__}.")


def decode(data: bytes) -> Any:
    """Undo :func:`encode`, tuples as lists; anything that it cannot have written is Invalid."""
    try:
        value, end = _decoded(data, 0)
        right = end == len(data) and encode(value) == data
    except (ValueError, IndexError, struct.error, RecursionError, TypeError):
        right = False
    if not right:
        raise Invalid(f"a record of {len(data)} bytes is damaged: it was cut off or changed.")
    return value


def _decoded(data: bytes, place: int) -> tuple[Any, int]:
    kind, count = data[place : place + 1], int.from_bytes(data[place + 1 : place + 9], "big")
    place += 9
    if kind in (b"l", b"d"):
        found = []
        for _ in range(count * (2 if kind == b"d" else 1)):
            one, place = _decoded(data, place)
            found.append(one)
        return (found if kind == b"l" else dict(zip(found[::2], found[1::2], strict=True))), place
    body = data[place : place + count]
    if len(body) != count:
        raise Invalid("a record ends within a field.")
    read: dict[bytes, Callable[[bytes], Any]] = {
        b"b": lambda body: body,
        b"s": bytes.decode,
        b"i": lambda body: int.from_bytes(body, "big", signed=True),
        b"f": lambda body: struct.unpack(">d", body)[0],
        b"t": lambda body: body != b"\0",
        b"n": lambda body: None,
    }
    if kind not in read:
        raise Invalid("a record has a field of no known type.")
    return read[kind](body), place + count


def hashed(label: bytes, value: Any) -> bytes:
    """SHA-256 of the encoding of a label and a value, which is not copied."""
    found = hashlib.sha256(encode(label))
    for piece in _pieces(value):
        found.update(piece)
    return found.digest()
