"""Who may take part: an authority enrols nodes, and its signature is all that others need to know.

Enrolment is the only trust that secure aggregation starts from. Without it a server could invent
nodes, count them among the survivors, and read the vectors of the few that are real.

A node's credential is an X.509 certificate. It counts while the clock is between its dates and its
serial number is not among the revoked: `Trust` has both, and is asked every time, also of a
credential whose signature was checked before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache

from fpfl.federation.secagg.certificates import (
    ISSUER,
    SERIAL_BYTES,
    blocks,
    certificate_to_pem,
    certificates_from_pem,
    check_extensions,
    check_index,
    check_name,
    fingerprint,
    load_certificate,
    now,
    read_key,
    read_subject,
    secret_from_pem,
    secret_to_pem,
    sign_certificate,
    subject,
)
from fpfl.federation.secagg.primitives import (
    KEY_BYTES,
    ByteSource,
    Invalid,
    public_of_signing,
)

DAYS = 365
"""How long a node's certificate counts, unless it is said otherwise."""

AUTHORITY_DAYS = 3650
"""How long the authority's does: every node has it, and all would have to be visited."""

AHEAD = timedelta(days=30)
"""So long before something ends the logs say so."""

_SLACK = timedelta(hours=1)  # clocks differ


def none_revoked() -> Container[int]:
    """For where there is no list."""
    return frozenset()


@dataclass(frozen=True)
class Trust:
    """Whom a node or the server believes: an authority, what it revoked, and a clock.

    Parameters
    ----------
    certificate : bytes
        The authority's own.
    revoked : function
        Gives the serial numbers that count no longer. It is called for every credential, so that
        a list that has come meanwhile is heeded at once; :class:`Invalid` where it has none that
        can be relied on.
    clock : function
        Gives the time.
    """

    certificate: bytes
    revoked: Callable[[], Container[int]] = none_revoked
    clock: Callable[[], datetime] = now

    @classmethod
    def from_pem(cls, data: bytes) -> Trust:
        """Read an authority's certificate, e.g. the file ``authority.key``."""
        if len(data) == KEY_BYTES:
            raise Invalid(
                "this is an authority's key of fpfl 0.1; now it is a certificate. Make the keys "
                "of the federation anew with this version: fpfl federation keys."
            )
        found = certificates_from_pem(data)
        if len(found) != 1:
            raise Invalid(f"expected one certificate, the authority's, but got {len(found)}.")
        _authority(found[0])
        return cls(found[0])

    def to_pem(self) -> bytes:
        """The authority's certificate, for a file."""
        return certificate_to_pem(self.certificate)

    @property
    def key(self) -> bytes:
        """The authority's Ed25519 public key."""
        return _authority(self.certificate)[0]

    @property
    def ends(self) -> datetime:
        """Until when the authority's certificate counts."""
        return _authority(self.certificate)[1]

    @property
    def fingerprint(self) -> str:
        """What people compare."""
        return fingerprint(self.key)

    def check(self, credential: Credential) -> None:
        """Whether a credential counts now; :class:`Invalid` with the reason."""
        time, name = self.clock(), credential.name
        if time > self.ends:
            raise Invalid(
                f"the authority's certificate ended on {self.ends:%Y-%m-%d}: the federation needs "
                "new keys, fpfl federation keys."
            )
        if time < credential.begins:
            raise Invalid(
                f"the certificate of {name!r} counts from {credential.begins:%Y-%m-%d %H:%M} UTC "
                f"on, and here it is {time:%Y-%m-%d %H:%M}: set the clocks."
            )
        if time > credential.ends:
            raise Invalid(
                f"the certificate of {name!r} ended on {credential.ends:%Y-%m-%d}: have it renewed "
                "(fpfl federation renew)."
            )
        if credential.serial in self.revoked():
            raise Invalid(f"the certificate of {name!r} was revoked by the authority.")

    def soon(self, credential: Credential) -> str:
        """A line for the log where a credential ends within a month; empty otherwise."""
        left = credential.ends - self.clock()
        if left > AHEAD:
            return ""
        return (
            f"the certificate of {credential.name!r} ends on {credential.ends:%Y-%m-%d}, in "
            f"{left.days} days: have it renewed (fpfl federation renew)"
        )


@dataclass(frozen=True)
class Credential:
    """A node's name, index and key, in a certificate that the authority signed.

    Parameters
    ----------
    name : str
        Up to 64 characters.
    index : int
        Where the node's shares are evaluated: different for each node, from 1 to 2³² − 1.
    key : bytes
        The node's Ed25519 public key.
    serial : int
        The certificate's number, at random: what a list names where it is revoked.
    begins, ends : datetime
        When it counts.
    certificate : bytes
        All of it, as it travels.
    """

    name: str
    index: int
    key: bytes
    serial: int
    begins: datetime
    ends: datetime
    certificate: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """What travels."""
        return self.certificate

    @property
    def fingerprint(self) -> str:
        """What people compare: of the key, the same in request, credential and identity."""
        return fingerprint(self.key)

    @staticmethod
    def verified(data: bytes, authority: Trust) -> Credential:
        """Read a credential and check it; :class:`Invalid` unless it counts now.

        Right signatures are kept: a process that meets a node again, in another session or as
        another node's neighbour, does not check its signature again, but its dates and the list.
        """
        found = _signed(data, authority.certificate)
        authority.check(found)
        return found

    @staticmethod
    def signed(data: bytes, authority: Trust) -> Credential:
        """Read a credential that the authority signed; it may have ended or been revoked."""
        return _signed(data, authority.certificate)


@lru_cache(maxsize=2**14)
def _signed(data: bytes, authority: bytes) -> Credential:
    found = load_certificate(data, _authority(authority)[0])
    check_extensions(found, authority=False)
    name, index = read_subject(found.subject)
    if index is None:
        raise Invalid(f"the certificate of {name!r} has no index.")
    dates = found.not_valid_before_utc, found.not_valid_after_utc
    return Credential(name, index, read_key(found), found.serial_number, *dates, data)


@lru_cache(maxsize=16)
def _authority(data: bytes) -> tuple[bytes, datetime]:
    """The key of an authority's certificate, and when it ends."""
    found = load_certificate(data, None)
    check_extensions(found, authority=True)
    return read_key(found), found.not_valid_after_utc


@dataclass(frozen=True)
class Identity:
    """What one node keeps for good: its signing key, its credential and whom it trusts."""

    credential: Credential
    authority: Trust
    signing: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.credential.name

    @property
    def index(self) -> int:
        """The node's index."""
        return self.credential.index

    def to_bytes(self) -> bytes:
        """Certificate, authority's certificate and secret key, in PEM: for the node alone."""
        own = certificate_to_pem(self.credential.certificate)
        return own + self.authority.to_pem() + secret_to_pem(self.signing)

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Undo :meth:`to_bytes`; :class:`Invalid` where the parts do not belong together.

        Whether it counts now is for `Trust.check`: one that has ended can still be looked at.
        """
        if b"fpfl secagg identity 1" in data[:64]:
            raise Invalid(
                "this is an identity of fpfl 0.1, which knew neither expiry nor revocation: make "
                "another with this version (fpfl federation request, certify, accept)."
            )
        found = blocks(data)
        if [kind for kind, _ in found] != ["CERTIFICATE", "CERTIFICATE", "PRIVATE KEY"]:
            raise Invalid("these bytes are no identity: give what Identity.to_bytes() returned.")
        own, _ = certificates_from_pem(data)
        trust = Trust.from_pem(found[1][1])
        identity = cls(_signed(own, trust.certificate), trust, secret_from_pem(found[2][1]))
        if public_of_signing(identity.signing) != identity.credential.key:
            raise Invalid(f"the signing key is not the one of the credential of {identity.name!r}.")
        if identity.to_bytes() != data:
            raise Invalid("these bytes are more than an identity, or were changed.")
        return identity


@dataclass(frozen=True)
class Authority:
    """Enrols nodes. Its secret key is needed for that alone, and may be kept off every network."""

    secret: bytes = field(repr=False)
    certificate: bytes = field(repr=False)

    @classmethod
    def make(
        cls, source: ByteSource = os.urandom, days: int = AUTHORITY_DAYS, at: datetime | None = None
    ) -> Authority:
        """With a fresh key, and a certificate by itself."""
        secret = source(KEY_BYTES)
        certificate = sign_certificate(
            secret,
            public_of_signing(secret),
            ISSUER,
            _dates(at, days),
            _serial(source),
            authority=True,
        )
        return cls(secret, certificate)

    @classmethod
    def from_pem(cls, secret: bytes, certificate: bytes) -> Authority:
        """Read its two files; :class:`Invalid` where they do not belong together."""
        if len(secret) == KEY_BYTES:
            raise Invalid(
                "this is an authority's secret of fpfl 0.1: make the keys of the federation anew "
                "with this version, fpfl federation keys."
            )
        trust, found = Trust.from_pem(certificate), secret_from_pem(secret)
        if public_of_signing(found) != trust.key:
            raise Invalid("the authority's secret is not the one of its certificate.")
        return cls(found, trust.certificate)

    @property
    def trust(self) -> Trust:
        """What nodes and server need to know of it; nothing is revoked."""
        return Trust(self.certificate)

    def enrol(
        self,
        name: str,
        index: int,
        source: ByteSource = os.urandom,
        days: int = DAYS,
        at: datetime | None = None,
    ) -> Identity:
        """A new node's identity, with a fresh signing key.

        The authority does not remember whom it enrolled: `fpfl.federation.register` does. Where
        two of one name or index meet in a session nevertheless, the second is refused.
        """
        signing = source(KEY_BYTES)
        given = self.certify(name, index, public_of_signing(signing), source, days, at)
        return Identity(given, self.trust, signing)

    def certify(
        self,
        name: str,
        index: int,
        key: bytes,
        source: ByteSource = os.urandom,
        days: int = DAYS,
        at: datetime | None = None,
    ) -> Credential:
        """A credential for a key that the node made itself and whose secret half it keeps.

        Parameters
        ----------
        name, index, key
            The node's.
        source
            Where the certificate's number comes from.
        days
            How long it counts; never longer than the authority's own certificate.
        at
            From when on; by default now.
        """
        check_name(name)
        check_index(index)
        if len(key) != KEY_BYTES:
            raise ValueError(f"a public key must have {KEY_BYTES} bytes, but got {len(key)}.")
        begins, ends = _dates(at, days)
        ends = min(ends, self.trust.ends)
        if ends <= begins:
            raise ValueError("the authority's certificate has ended: make new keys.")
        named, serial = subject(name, index), _serial(source)
        data = sign_certificate(self.secret, key, named, (begins, ends), serial, authority=False)
        return Credential(name, index, key, serial, begins, ends, data)


def _dates(at: datetime | None, days: int) -> tuple[datetime, datetime]:
    if days < 1:
        raise ValueError(f"a certificate must count for at least a day, but got {days!r} days.")
    begin = (at or now()).replace(microsecond=0)
    return begin - _SLACK, begin + timedelta(days=days)


def _serial(source: ByteSource) -> int:
    """159 bits at random, as RFC 5280 would have it: positive, and no two alike."""
    return int.from_bytes(source(SERIAL_BYTES), "big") >> 1 or 1
