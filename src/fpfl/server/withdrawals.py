"""Users who withdraw: a list in the run folder, which a run reads before it draws a cohort.

The list names users by their index and is as confidential as the list of users. The ledger, which
others may be shown, has only how many they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fpfl.store.files import explained, write_all

WITHDRAWALS = "withdrawals.txt"


def withdraw(folder: Path, users: Iterable[int]) -> None:
    """Add users to the withdrawals of a run; it may be running."""
    lines = "".join(f"{int(user)}\n" for user in users).encode()
    path = folder / WITHDRAWALS
    with explained(path, "The withdrawal was not recorded"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            write_all(file, lines)
            os.fsync(file)
        finally:
            os.close(file)


def read_withdrawals(path: Path) -> frozenset[int]:
    """The users on a list; none where there is no list.

    A last line that is not finished is not read: half of a number names somebody else.
    """
    if not path.exists():
        return frozenset()
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    try:
        return frozenset(int(line) for line in whole.splitlines() if line.strip())
    except ValueError as error:
        raise ValueError(
            f"{path} must have one user's index on each line ({error}); correct it"
        ) from error
