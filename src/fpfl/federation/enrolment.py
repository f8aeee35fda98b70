"""Enrolment: who gets which key, who signs what, and where the files are.

KEYS/authority.secret          enrols nodes and revokes them; keep it off the network
KEYS/authority.key             its certificate, for the server (and, within their identities, nodes)
KEYS/register.jsonl            every certificate that was given out; stays beside the secret
KEYS/revoked.crl               the list of the revoked, once there is one: for server and nodes
KEYS/ca.pem ca.secret server.pem server.key    TLS (`fpfl.federation.transport`)
KEYS/node-1/identity           who the node is in secure aggregation: for this node alone
KEYS/node-1/supernode(.pub)    who it is to Flower: the key, and what is registered

Where nobody but a node may ever have its keys, the node makes them (`make_request`), the authority
signs the request (`certify`), and the node puts the two together (`accept`). Two fingerprints are
compared on the way, by people, over a line of their own: the request's by the authority, the
authority's by the node. What a file says of itself proves neither.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from fpfl.federation.register import Entry, Register
from fpfl.federation.revocation import REVOKED, RevocationFile, Revocations, newest, remember
from fpfl.federation.secagg import Authority, Credential, Identity, Invalid, Refused, Trust
from fpfl.federation.secagg import certificates as x509
from fpfl.federation.secagg.identity import DAYS
from fpfl.federation.secagg.primitives import KEY_BYTES, public_of_signing
from fpfl.federation.transport import (
    ROOT,
    ROOT_KEY,
    SERVER,
    SERVER_KEY,
    SUPERNODE,
    host_names,
    make_certificates,
    make_supernode_key,
    renew_server,
)
from fpfl.store.files import explained, write_whole

__all__ = [
    "AUTHORITY",
    "CREDENTIAL",
    "IDENTITY",
    "LIST_DAYS",
    "REGISTER",
    "REQUEST",
    "REVOKED",
    "ROOT",
    "ROOT_KEY",
    "SECRET",
    "SERVER",
    "SERVER_KEY",
    "SIGNING",
    "SUPERNODE",
    "Request",
    "accept",
    "accept_list",
    "certify",
    "ending",
    "load_identity",
    "load_trust",
    "make_keys",
    "make_request",
    "read_request",
    "renew",
    "renew_server",
    "revoke",
]

IDENTITY = "identity"
SIGNING, REQUEST, CREDENTIAL = "signing.secret", "request", "credential"
SECRET, AUTHORITY, REGISTER = "authority.secret", "authority.key", "register.jsonl"

LIST_DAYS = 90
"""How long a list of the revoked can be relied on, unless it is said otherwise."""


# --- all keys at once -----------------------------------------------------------------------------


def make_keys(
    folder: Path,
    nodes: int,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    *,
    days: int = DAYS,
    at: datetime | None = None,
) -> Trust:
    """Make all keys of a federation in a new folder, which is there whole or not at all.

    Parameters
    ----------
    folder
        Where to; nothing may be there yet.
    nodes
        How many nodes are enrolled, as ``node-1`` and so on. None, where every node makes its own.
    hosts
        Names or addresses that the SuperLink is reached by.
    days
        How long nodes' certificates count.
    at
        From when on; by default now.

    Returns
    -------
    Trust
        The authority, whose fingerprint nodes have to know.
    """
    if 0 < nodes < 3 or nodes < 0:
        raise ValueError(
            f"nodes is {nodes}; a federation needs at least 3, or 0 where each makes its own keys"
        )
    host_names(hosts)
    with _new_folder(folder) as part:
        authority = Authority.make(at=at)
        write_whole(part / SECRET, x509.secret_to_pem(authority.secret), mode=0o600)
        write_whole(part / AUTHORITY, authority.trust.to_pem())
        make_certificates(part, hosts, at)
        with Register.create(part / REGISTER, authority.trust) as register:
            for number in range(1, nodes + 1):
                place = part / f"node-{number}"
                place.mkdir(mode=0o700)
                identity = authority.enrol(f"node-{number}", number, days=days, at=at)
                register.add(identity.credential)
                write_whole(place / IDENTITY, identity.to_bytes(), mode=0o600)
                make_supernode_key(place / SUPERNODE)
    return authority.trust


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes its name when all of it is there, or goes."""
    target = folder.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    with explained(folder, "Nothing was written; name another folder, or free space"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Nobody can have put anything at a name that is made up now; its mode is 0700.
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield part
            os.replace(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


# --- a node's side --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a request asks for; whoever made it has the key."""

    name: str
    index: int | None
    key: bytes

    @property
    def fingerprint(self) -> str:
        """What the node reads to the authority."""
        return x509.fingerprint(self.key)


def make_request(folder: Path, name: str | None = None) -> Path:
    """A node's own keys in a new folder; the file with the request, for the authority.

    Where the folder has an identity already, the request is for a new key under the same name and
    index; the old identity serves until the new one is accepted.
    """
    if (folder / IDENTITY).is_file():
        old = Identity.from_bytes((folder / IDENTITY).read_bytes())
        if name not in (None, old.name):
            raise ValueError(f"{folder} is {old.name!r}'s; {name!r} needs a folder of its own")
        if (folder / SIGNING).exists():
            raise ValueError(
                f"{folder / SIGNING} is there already: a request was made and not accepted yet. "
                f"Send {folder / REQUEST}, or remove both files for another one"
            )
        return _request(folder, old.name, old.index)
    name = folder.resolve().name if name is None else name
    x509.check_name(name)
    with _new_folder(folder) as part:
        make_supernode_key(part / SUPERNODE)
        _request(part, name, None)
    return folder / REQUEST


def _request(folder: Path, name: str, index: int | None) -> Path:
    secret = os.urandom(KEY_BYTES)
    write_whole(folder / SIGNING, x509.secret_to_pem(secret), mode=0o600)
    write_whole(folder / REQUEST, x509.make_request(secret, name, index))
    return folder / REQUEST


def accept(
    folder: Path, credential: Path, authority: str, *, at: datetime | None = None
) -> Identity:
    """A node's identity, from its own key and the credential that came back.

    Parameters
    ----------
    folder
        The node's, with the key of its request, or with the identity that is renewed.
    credential
        What the authority sent: the certificate, and the authority's own.
    authority
        The authority's fingerprint, as the authority says it by another way than this file's.
    at
        The time; by default now.
    """
    data = credential.read_bytes()
    if data[:1] == b"\0":
        x509.load_certificate(data, None)  # of 0.1, and the error says so
    found = [block for kind, block in x509.blocks(data) if kind == "CERTIFICATE"]
    if len(found) != 2:
        raise Invalid(
            f"{credential} is no credential: expected the node's certificate and the authority's, "
            f"but got {len(found)} certificates."
        )
    trust = Trust.from_pem(found[1])
    _compare(authority, trust.key, f"the authority in {credential}", "Ask the authority again")
    trust = Trust(trust.certificate, clock=lambda: at or x509.now())
    own = Credential.verified(x509.certificates_from_pem(found[0])[0], trust)
    made, known = folder / SIGNING, folder / IDENTITY
    before = Identity.from_bytes(known.read_bytes()) if known.is_file() else None
    if before is not None:
        _check_renewal(before, own, trust)
    secrets = [x509.secret_from_pem(made.read_bytes())] if made.is_file() else []
    if before is not None:
        secrets.append(before.signing)
    if not secrets:
        raise ValueError(f"{folder} has no key: make a request there first")
    right = [one for one in secrets if public_of_signing(one) == own.key]
    if not right:
        raise Invalid(
            f"{credential} is for another key (fingerprint {own.fingerprint}) than those in "
            f"{folder}: it is not the one of the credential that was asked for."
        )
    identity = Identity(own, Trust(trust.certificate), right[0])
    write_whole(known, identity.to_bytes(), mode=0o600)
    if made.is_file() and right[0] == secrets[0]:
        made.unlink()
        (folder / REQUEST).unlink(missing_ok=True)
    return identity


def _check_renewal(before: Identity, new: Credential, trust: Trust) -> None:
    if before.authority.key != trust.key:
        raise Invalid(
            f"the identity of {before.name!r} is of another authority; take a new folder for it."
        )
    if (before.name, before.index) != (new.name, new.index):
        raise Invalid(
            f"the credential is for {new.name!r} with index {new.index}, and the identity that is "
            f"there is {before.name!r} with index {before.index}."
        )
    if new.ends < before.credential.ends:
        raise Invalid(
            f"the credential ends on {new.ends:%Y-%m-%d}, before the one that is there: it is an "
            "older one."
        )


def accept_list(place: Path, new: Path, *, at: datetime | None = None) -> Revocations:
    """Put a list of the revoked where a node or the server reads it; never an older one.

    Parameters
    ----------
    place
        A folder with an identity, or with the authority's certificate.
    new
        The list that the authority sent.
    at
        The time; by default now.
    """
    if (place / IDENTITY).is_file():
        trust = Identity.from_bytes((place / IDENTITY).read_bytes()).authority
    elif (place / AUTHORITY).is_file():
        trust = Trust.from_pem((place / AUTHORITY).read_bytes())
    else:
        raise ValueError(f"{place} has no {IDENTITY} and no {AUTHORITY}: name the folder that has")
    data = new.read_bytes()
    found = Revocations.read(data, trust)
    last = newest(place / REVOKED)
    if found.number < last:
        raise Invalid(f"{new} has the number {found.number}, and {place} has number {last}.")
    if (at or x509.now()) > found.ends:
        raise Invalid(f"{new} ended on {found.ends:%Y-%m-%d}: ask for a newer one.")
    write_whole(place / REVOKED, data)
    if found.number > last:
        remember(place / REVOKED, found.number)
    return found


def load_identity(path: Path, clock: Callable[[], datetime] = x509.now) -> Identity:
    """A node's identity as it is used: with the list beside it, and refused where it has ended."""
    identity = Identity.from_bytes(path.read_bytes())
    trust = _heeding(path, identity.authority, clock)
    try:
        trust.check(identity.credential)
    except Invalid as error:
        raise Refused(identity.name, str(error)) from None
    return replace(identity, authority=trust)


def load_trust(path: Path, clock: Callable[[], datetime] = x509.now) -> Trust:
    """The authority's certificate as the server uses it: with the list beside it."""
    return _heeding(path, Trust.from_pem(path.read_bytes()), clock)


def _heeding(path: Path, trust: Trust, clock: Callable[[], datetime]) -> Trust:
    revoked = RevocationFile(path.with_name(REVOKED), trust, clock)
    return replace(trust, revoked=revoked, clock=clock)


def ending(trust: Trust, credential: Credential | None = None) -> list[str]:
    """Lines for the log: what ends within a month."""
    said = [] if credential is None else [trust.soon(credential)]
    if isinstance(trust.revoked, RevocationFile):
        said.append(trust.revoked.soon())
    return [line for line in said if line]


# --- the authority's side -------------------------------------------------------------------------


def read_request(path: Path) -> Request:
    """A request that its key has signed; what it asks for is nobody's word but the sender's."""
    return Request(*x509.read_request(path.read_bytes()))


def certify(
    keys: Path,
    request: Path,
    fingerprint: str,
    name: str | None = None,
    index: int | None = None,
    *,
    days: int = DAYS,
    at: datetime | None = None,
) -> Credential:
    """The authority's side: a credential for a new node, beside its request.

    Parameters
    ----------
    keys
        The folder with the authority's secret and its register.
    request
        What the node sent.
    fingerprint
        Of the request's key, as the node says it by another way than this file's.
    name, index
        The node's; by default the name in the request and the next index that is free. Neither
        may have been given out before.
    days
        How long the certificate counts.
    at
        From when on; by default now.
    """
    asked = read_request(request)
    _compare(fingerprint, asked.key, str(request), "Ask the node again")
    authority = _authority(keys)
    with Register.open(keys / REGISTER, authority.trust) as register:
        name = asked.name if name is None else name
        index = register.free_index() if index is None else index
        for known in register.with_key(asked.key):
            before = known.credential.name
            raise ValueError(
                f"the key of {request} was certified before, for {before!r}: one node, one name "
                f"(fpfl federation renew {shlex.quote(before)} hands out another certificate)"
            )
        register.check_free(name, index)
        credential = authority.certify(name, index, asked.key, days=days, at=at)
        register.add(credential)
        _hand_out(request.with_name(CREDENTIAL), credential, authority)
    return credential


def renew(
    keys: Path,
    name: str,
    out: Path,
    request: Path | None = None,
    fingerprint: str | None = None,
    *,
    revoke_old: bool = False,
    days: int = DAYS,
    at: datetime | None = None,
) -> Credential:
    """A new certificate for a node that is in the register, with its name and its index.

    Parameters
    ----------
    keys, name
        Where the register is, and who is in it.
    out
        The file to write the credential to.
    request, fingerprint
        For a new key: the node's request, and its fingerprint as the node says it. By default the
        certificate is for the key that the last one was for, unless that was revoked.
    revoke_old
        Whether earlier certificates count no longer; the new list is for all nodes and the server.
    days
        How long the certificate counts.
    at
        From when on; by default now.
    """
    if revoke_old and request is None:
        raise ValueError(
            "the old certificate is revoked where the key is a new one: give the node's request"
        )
    authority = _authority(keys)
    with Register.open(keys / REGISTER, authority.trust) as register:
        known = _known(register, name)
        last = known[-1].credential
        if request is None:
            key = last.key
            if any(one.revoked for one in register.with_key(key)):
                raise ValueError(
                    f"the key of {name!r} was revoked: let the node make a new one (fpfl "
                    "federation request) and renew with --request"
                )
        else:
            asked = read_request(request)
            _compare(fingerprint or "", asked.key, str(request), "Ask the node again")
            key = asked.key
            for other in register.with_key(key):
                if other.credential.name != name or other.revoked:
                    raise ValueError(
                        f"the key of {request} was {other.credential.name!r}'s"
                        f"{' and was revoked' if other.revoked else ''}: let the node make a new "
                        "one, fpfl federation request"
                    )
        credential = authority.certify(name, last.index, key, days=days, at=at)
        register.add(credential)
        if revoke_old and (old := [one for one in known if not one.revoked]):
            register.revoke(old, at or x509.now())
            _sign_list(keys, register, authority, LIST_DAYS, at)
        _hand_out(out, credential, authority)
    return credential


def revoke(
    keys: Path, names: Sequence[str] = (), *, days: int = LIST_DAYS, at: datetime | None = None
) -> Path:
    """Revoke every certificate of some nodes, and sign the list anew; the file with the list.

    Parameters
    ----------
    keys
        The folder with the authority's secret and its register.
    names
        Whose; with none, the list says what it said and can be relied on for longer.
    days
        How long the list can be relied on.
    at
        The time; by default now.
    """
    authority = _authority(keys)
    with Register.open(keys / REGISTER, authority.trust) as register:
        found = [_known(register, name) for name in names]
        for known in found:
            if valid := [one for one in known if not one.revoked]:
                register.revoke(valid, at or x509.now())
        return _sign_list(keys, register, authority, days, at)


def _sign_list(
    keys: Path, register: Register, authority: Authority, days: int, at: datetime | None
) -> Path:
    """The list by the register; nodes whose folders are still here get it as well."""
    begin = at or x509.now()
    revoked = [(one.credential.serial, one.revoked) for one in register.entries if one.revoked]
    data = x509.sign_list(
        authority.secret,
        revoked,
        register.next_list(),
        (begin - timedelta(hours=1), begin + timedelta(days=days)),
    )
    for place in (keys, *(one.parent for one in sorted(keys.glob(f"*/{IDENTITY}")))):
        write_whole(place / REVOKED, data)
    return keys / REVOKED


def _known(register: Register, name: str) -> list[Entry]:
    found = register.of(name)
    if not found:
        names = sorted({one.credential.name for one in register.entries})
        raise ValueError(
            f"{name!r} is not in the register, which has {', '.join(names[:20]) or 'nobody'}"
        )
    return found


def _authority(keys: Path) -> Authority:
    for path in (keys / SECRET, keys / AUTHORITY):
        if not path.is_file():
            raise ValueError(f"{path} is not there: this is done where the authority's keys are")
    return Authority.from_pem((keys / SECRET).read_bytes(), (keys / AUTHORITY).read_bytes())


def _hand_out(path: Path, credential: Credential, authority: Authority) -> None:
    own = x509.certificate_to_pem(credential.certificate)
    write_whole(path, own + authority.trust.to_pem())


def _compare(given: str, key: bytes, what: str, advice: str) -> None:
    if not x509.same_fingerprint(given, key):
        raise Invalid(
            f"the fingerprint of {what} is {x509.fingerprint(key)}, and {given!r} was expected: "
            f"it is another's, or was swapped on the way. {advice}, by telephone or in person."
        )
