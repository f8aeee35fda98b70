"""Users who withdraw: a list in the run folder, which a run reads before it draws a cohort.

The list names users by their index and is as confidential as the list of users. The ledger, which
others may be shown, has only how many they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from fpfl.store.files import explained, write_all

WITHDRAWALS = "withdrawals.txt"
_INDEX = re.compile(rb"[0-9]{1,18}")
_TORN = b"?"
"""Ends a line that a crash or a full disk cut off: what is left of it names nobody."""


def withdraw(folder: Path, users: Iterable[int]) -> None:
    """Add users to the withdrawals of a run; it may be running."""
    lines = "".join(f"{int(user)}\n" for user in users).encode()
    path = folder / WITHDRAWALS
    with explained(path, "The withdrawal was not recorded"):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                lines = _TORN + b"\n" + lines
            write_all(file, lines)
            os.fsync(file)
        finally:
            os.close(file)


def read_withdrawals(path: Path) -> frozenset[int]:
    """The users on a list; none where there is no list.

    A line that was not finished is not read: half of a number names somebody else.
    """
    if not path.exists():
        return frozenset()
    # Bytes, and plain digits alone: what int() makes of signs, underscores and other alphabets'
    # digits would leave out somebody who did not ask for it.
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    users = set()
    for number, line in enumerate(map(bytes.strip, whole.split(b"\n")), start=1):
        if not line or line.endswith(_TORN):
            continue
        if not _INDEX.fullmatch(line):
            raise ValueError(
                f"{path}, line {number} is {line[:40]!r}; expected one user's index on each line, "
                "in plain digits. Correct it"
            )
        users.add(int(line))
    return frozenset(users)
