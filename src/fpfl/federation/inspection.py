"""What is in the files of enrolment, in words: names, fingerprints, dates; never a secret."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from fpfl.federation.enrolment import AUTHORITY, IDENTITY, REGISTER, read_request
from fpfl.federation.register import Register
from fpfl.federation.revocation import Revocations
from fpfl.federation.secagg import Credential, Identity, Trust
from fpfl.federation.secagg import certificates as x509
from fpfl.federation.secagg.primitives import KEY_BYTES


def described(path: Path, *, at: datetime | None = None) -> list[str]:
    """What is in a request, credential, identity, list, register or authority's certificate.

    Parameters
    ----------
    path
        The file.
    at
        The time; by default now.
    """
    data, time = path.read_bytes(), at or x509.now()
    if path.name == REGISTER or data[:1] == b"{":
        return _register_in_words(path, time)
    kinds = [kind for kind, _ in x509.blocks(data)]
    if kinds == ["CERTIFICATE REQUEST"]:
        asked = read_request(path)
        which = "" if asked.index is None else f", index {asked.index}"
        return [f"request of {asked.name!r}{which}", f"  fingerprint {asked.fingerprint}"]
    if kinds == ["X509 CRL"]:
        beside = path.with_name(AUTHORITY)
        if beside.is_file():
            trust = Trust.from_pem(beside.read_bytes())
        elif (beside := path.with_name(IDENTITY)).is_file():
            trust = Identity.from_bytes(beside.read_bytes()).authority
        else:
            raise ValueError(f"{path}: put {AUTHORITY} beside it, to see whose list it is")
        found = Revocations.read(data, trust)
        over = ", which is over" if time > found.ends else ""
        return [
            f"list {found.number} of {len(found.serials)} revoked certificates",
            f"  signed by {trust.fingerprint}",
            f"  from {_date(found.signed)} to {_date(found.ends)}{over}",
            *(f"  {serial:x} revoked {_date(when)}" for serial, when in found.serials.items()),
        ]
    if kinds == ["CERTIFICATE"]:
        trust = Trust.from_pem(data)
        return ["authority", f"  fingerprint {trust.fingerprint}", f"  to {_date(trust.ends)}"]
    if kinds[:2] == ["CERTIFICATE", "CERTIFICATE"]:
        if kinds[2:]:
            identity = Identity.from_bytes(data)
            what, own, trust = "identity", identity.credential, identity.authority
        else:
            what, trust = "credential", Trust.from_pem(x509.blocks(data)[1][1])
            own = Credential.signed(x509.certificates_from_pem(data)[0], trust)
        return [
            f"{what} of {own.name!r}, index {own.index}",
            *_certificate_in_words(own, time),
            f"  signed by an authority whose fingerprint is {trust.fingerprint}",
        ]
    if data[:1] == b"\0" or len(data) == KEY_BYTES:
        raise ValueError(f"{path} is a file of fpfl 0.1, or none of a federation")
    raise ValueError(f"{path} is none of: request, credential, identity, list, register, authority")


def _register_in_words(path: Path, time: datetime) -> list[str]:
    beside = path.with_name(AUTHORITY)
    if not beside.is_file():
        raise ValueError(f"{path}: put {AUTHORITY} beside it, to see whose register it is")
    trust = Trust.from_pem(beside.read_bytes())
    with Register.open(path, trust, write=False) as register:
        said = [f"register of the authority {trust.fingerprint}"]
        for one in register.entries:
            gone = f"  revoked {_date(one.revoked)}" if one.revoked else ""
            said += [
                f"{one.credential.name!r}, index {one.credential.index}",
                *_certificate_in_words(one.credential, time),
                *([gone] if gone else []),
            ]
        return said


def _certificate_in_words(own: Credential, time: datetime) -> list[str]:
    over = ", which is over" if time > own.ends else ""
    return [
        f"  fingerprint {own.fingerprint}",
        f"  serial {own.serial:x}",
        f"  from {_date(own.begins)} to {_date(own.ends)}{over}",
    ]


def _date(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
