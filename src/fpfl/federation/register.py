"""The authority's register: every certificate that was given out, and every revocation.

One line each, in a chain of hashes (`fpfl.store.chain`), beside the authority's secret. A line is
on the disk before what it says is handed out, and the register is locked meanwhile. Without it
nobody could look up which names and indices are given: nothing is signed where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fpfl.federation.secagg import Credential, Invalid, Trust
from fpfl.store.chain import Chain

_KIND = "fpfl federation register"


@dataclass(frozen=True)
class Entry:
    """A certificate that was given out.

    Parameters
    ----------
    credential
        The certificate.
    given
        When.
    revoked
        When, where it was.
    """

    credential: Credential
    given: str
    revoked: datetime | None = None


class Register:
    """What was given out, looked up and added to; made by :meth:`create` or :meth:`open`."""

    def __init__(self, chain: Chain, authority: Trust):
        self._chain = chain
        self._authority = authority
        self.entries: list[Entry] = []
        self.number = 0
        """Of the list of the revoked that was signed last."""
        if chain.records[0].get("of") != _KIND:
            raise ValueError(f"{chain.path} is no register of a federation")
        if chain.records[0].get("authority") != authority.fingerprint:
            raise ValueError(f"{chain.path} is the register of another authority than the key's")
        for record in chain.records:
            self._read(record)

    @classmethod
    @contextmanager
    def create(cls, path: Path, authority: Trust) -> Iterator[Register]:
        """A new one, where there is none."""
        with Chain.create(path, of=_KIND, authority=authority.fingerprint) as chain:
            chain.lock()
            yield cls(chain, authority)

    @classmethod
    @contextmanager
    def open(cls, path: Path, authority: Trust, write: bool = True) -> Iterator[Register]:
        """The one that is there; to write to it, no other process may have it open."""
        if not path.is_file():
            raise ValueError(
                f"{path} is not there: without the register nobody knows which names and indices "
                "are given. Restore it from a backup"
            )
        with Chain.open(path, write, lock=write) as chain:
            yield cls(chain, authority)

    def _read(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "certificate":
            data = bytes.fromhex(record["certificate"])
            try:
                credential = Credential.signed(data, self._authority)
            except Invalid as error:
                raise ValueError(f"{self._chain.path}, line {record['n'] + 1}: {error}") from None
            self.entries.append(Entry(credential, record["time"]))
        elif kind == "revocation":
            serials = {int(one, 16) for one in record["serials"]}
            when = datetime.fromisoformat(record["revoked"])
            self.entries = [
                replace(one, revoked=one.revoked or when)
                if one.credential.serial in serials
                else one
                for one in self.entries
            ]
        elif kind == "list":
            self.number = record["number"]

    def _append(self, kind: str, **fields: Any) -> None:
        self._read(self._chain.append(kind, **fields))
        self._chain.sync()

    # --- looking up -------------------------------------------------------------------------------

    def of(self, name: str) -> list[Entry]:
        """What was given to a node, the newest last."""
        return [one for one in self.entries if one.credential.name == name]

    def with_key(self, key: bytes) -> list[Entry]:
        """What was given out for a key."""
        return [one for one in self.entries if one.credential.key == key]

    def free_index(self) -> int:
        """One more than the highest so far: none is given twice, not even a revoked node's."""
        return 1 + max((one.credential.index for one in self.entries), default=0)

    def check_free(self, name: str, index: int) -> None:
        """Raise where a name or an index was given out before."""
        for one in self.entries:
            known = one.credential
            if known.name == name:
                raise ValueError(
                    f"{name!r} is in the register, with index {known.index} and the fingerprint "
                    f"{known.fingerprint}: for the same node, fpfl federation renew; for another, "
                    "another name"
                )
            if known.index == index:
                raise ValueError(
                    f"the index {index} is of {known.name!r} in the register; {self.free_index()} "
                    "is free"
                )

    # --- writing down -----------------------------------------------------------------------------

    def add(self, credential: Credential) -> None:
        """A certificate that is about to be handed out."""
        self._append(
            "certificate",
            name=credential.name,
            index=credential.index,
            fingerprint=credential.fingerprint,
            serial=f"{credential.serial:x}",
            begins=credential.begins.isoformat(),
            ends=credential.ends.isoformat(),
            certificate=credential.to_bytes().hex(),
        )

    def revoke(self, given: Sequence[Entry], when: datetime) -> None:
        """Certificates that count no longer."""
        self._append(
            "revocation",
            name=given[0].credential.name,
            serials=[f"{one.credential.serial:x}" for one in given],
            revoked=when.isoformat(),
        )

    def next_list(self) -> int:
        """The number of a list that is about to be signed: none has the same."""
        self._append("list", number=self.number + 1)
        return self.number
