"""Keys as people expect them: fingerprints, possession, dates, revocation, renewal, a register."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import shutil
import ssl
import stat
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="a federation takes cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.federation import enrolment, transport
from fpfl.federation.enrolment import (
    AUTHORITY,
    CREDENTIAL,
    IDENTITY,
    REGISTER,
    REQUEST,
    REVOKED,
    SECRET,
    SIGNING,
    accept,
    accept_list,
    certify,
    load_identity,
    load_trust,
    make_keys,
    make_request,
    read_request,
    renew,
    revoke,
)
from fpfl.federation.inspection import described
from fpfl.federation.register import Register
from fpfl.federation.revocation import RevocationFile, Revocations
from fpfl.federation.secagg import (
    Authority,
    Credential,
    Deal,
    Dealing,
    Identity,
    Invalid,
    Refused,
    Trust,
    advertise,
    share,
)
from fpfl.federation.secagg import certificates as formats
from fpfl.federation.secagg.primitives import public_of_signing
from fpfl.store.files import BusyError

NOW = datetime(2031, 5, 4, 3, 2, 1, tzinfo=UTC)
DAY = timedelta(days=1)
MADE = Authority.make(at=NOW)
ONE = MADE.enrol("hospital", 6, at=NOW)


def at(when: datetime, trust: Trust = MADE.trust, **more) -> Trust:
    return replace(trust, clock=lambda: when, **more)


@pytest.fixture
def keys(tmp_path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder, 3, at=NOW)
    return folder


def hospital(keys: Path, name: str = "hospital") -> Path:
    """A node that made its own keys and has its credential accepted."""
    folder = keys.parent / name
    request = make_request(folder)
    certify(keys, request, read_request(request).fingerprint, at=NOW)
    accept(folder, folder / CREDENTIAL, load_trust(keys / AUTHORITY).fingerprint, at=NOW)
    return folder


# --- certificates ---------------------------------------------------------------------------------


def test_a_credential_counts_between_its_dates_and_no_longer():
    data = ONE.credential.to_bytes()
    assert Credential.verified(data, at(NOW)) == ONE.credential
    assert Credential.verified(data, at(NOW + 365 * DAY)).name == "hospital"
    # The signature was checked, and is remembered: its dates are looked at all the same.
    with pytest.raises(Invalid, match=r"ended on 2032-05-03.*fpfl federation renew"):
        Credential.verified(data, at(NOW + 366 * DAY))
    with pytest.raises(Invalid, match="set the clocks"):
        Credential.verified(data, at(NOW - DAY))
    assert Credential.verified(data, at(NOW - timedelta(minutes=59))).index == 6  # clocks differ


def test_a_credential_that_was_checked_before_does_not_outlive_its_revocation():
    data, revoked = ONE.credential.to_bytes(), set()
    trust = at(NOW, revoked=lambda: revoked)
    Credential.verified(data, trust)
    revoked.add(ONE.credential.serial)
    with pytest.raises(Invalid, match="'hospital' was revoked"):
        Credential.verified(data, trust)


def test_no_certificate_outlives_its_authority():
    soon = Authority.make(days=10, at=NOW)
    given = soon.enrol("a", 1, at=NOW).credential
    assert given.ends == soon.trust.ends == NOW + 10 * DAY
    with pytest.raises(Invalid, match="the authority's certificate ended"):
        Credential.verified(given.to_bytes(), at(NOW + 11 * DAY, soon.trust))
    with pytest.raises(ValueError, match="has ended"):
        soon.certify("b", 2, given.key, at=NOW + 20 * DAY)
    with pytest.raises(ValueError, match="at least a day"):
        soon.certify("b", 2, given.key, days=0)


def test_every_door_asks_for_dates_and_revocation():
    """Nodes of their neighbours, and the server of nodes."""
    nodes = {f"n{i}": MADE.enrol(f"n{i}", i + 1, at=NOW, days=10) for i in range(4)}
    dealing = Dealing(b"r" * 16, 1, 1, size=3, threshold=3, least=3)
    gone = nodes["n3"].credential.serial
    for trust, why in (
        (at(NOW + 11 * DAY), "ended"),
        (at(NOW, revoked=lambda: {gone}), "revoked"),
    ):
        server = Deal(dealing, trust, nodes)
        with pytest.raises(Refused, match=why):
            server.take("n3", advertise(nodes["n3"], dealing)[1])
        careless = Deal(dealing, at(NOW), nodes)
        states = {}
        for name, one in nodes.items():
            states[name], answer = advertise(one, dealing)
            careless.take(name, answer)
        careless.close_step()
        careful = replace(nodes["n0"], authority=trust)
        with pytest.raises(Refused, match=why):
            share(states["n0"], careless.requests()["n0"], careful)


def credential_from(data: bytes) -> object:
    return Credential.verified(data, at(NOW))


def authority_from(data: bytes) -> object:
    return Credential.verified(ONE.credential.to_bytes(), at(NOW, Trust(data)))


def request_from(data: bytes) -> object:
    return formats.read_request(pem("CERTIFICATE REQUEST", data))


def list_from(data: bytes) -> object:
    return Revocations.read(pem("X509 CRL", data), MADE.trust)


REQUESTED = formats.make_request(bytes(range(32)), "hospital", 6)
LISTED = formats.sign_list(MADE.secret, [(77, NOW), (78, NOW)], 4, (NOW, NOW + DAY))
SIGNED = {
    credential_from: ONE.credential.to_bytes(),
    authority_from: MADE.certificate,
    request_from: x509.load_pem_x509_csr(REQUESTED).public_bytes(Encoding.DER),
    list_from: x509.load_pem_x509_crl(LISTED).public_bytes(Encoding.DER),
}


@pytest.mark.parametrize("read", SIGNED)
@settings(max_examples=200)
@given(data=st.data())
def test_any_byte_that_is_altered_is_refused(read, data):
    """Of certificates, requests and lists: also around what is signed, where X.509 leaves room."""
    whole = SIGNED[read]
    assert read(whole)
    size = len(whole)
    places = st.integers(0, size - 1) | st.integers(0, 20) | st.integers(size - 80, size - 1)
    place, other = data.draw(places), data.draw(st.integers(1, 255))
    changed = whole[:place] + bytes([whole[place] ^ other]) + whole[place + 1 :]
    for wrong in (changed, whole[:place], whole + bytes([other])):
        with pytest.raises(Invalid):
            read(wrong)


def pem(kind: str, data: bytes) -> bytes:
    body = base64.encodebytes(data)
    return f"-----BEGIN {kind}-----\n".encode() + body + f"-----END {kind}-----\n".encode()


def test_the_room_that_x509_leaves_is_not_given():
    """Bits of a signature that do not count could be altered, and the signature would hold."""
    for _ in range(64):
        whole = MADE.certify("a", 1, ONE.credential.key, at=NOW).to_bytes()
        changed = whole[:-65] + b"\1" + whole[-64:]
        try:
            x509.load_der_x509_certificate(changed).signature  # noqa: B018
        except ValueError:
            continue  # its last bit is set, and then the format itself objects
        with pytest.raises(Invalid, match="around its signature"):
            Credential.verified(changed, at(NOW))
        return
    pytest.fail("no signature ended with an even byte")


def test_a_certificate_that_is_no_node_s_is_no_credential():
    """Signed by the authority, and yet: its own, one without an index, one that demands more."""
    with pytest.raises(Invalid, match="authority's or a node's"):
        Credential.verified(MADE.certificate, at(NOW))
    with pytest.raises(Invalid, match="by itself"):
        Trust.from_pem(formats.certificate_to_pem(ONE.credential.to_bytes()))
    dates, key = (NOW, NOW + DAY), ONE.credential.key
    named = formats.subject("a", None)
    plain = formats.sign_certificate(MADE.secret, key, named, dates, 5, authority=False)
    with pytest.raises(Invalid, match="no index"):
        Credential.verified(plain, at(NOW))
    more = (
        x509.CertificateBuilder()
        .subject_name(formats.subject("a", 1))
        .issuer_name(formats.ISSUER)
        .public_key(Ed25519PrivateKey.generate().public_key())
        .serial_number(5)
        .not_valid_before(NOW)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(True, *[False] * 8), critical=True)
        .add_extension(x509.InhibitAnyPolicy(0), critical=True)
        .sign(Ed25519PrivateKey.from_private_bytes(MADE.secret), None)
    )
    with pytest.raises(Invalid, match="demands more"):
        Credential.verified(more.public_bytes(Encoding.DER), at(NOW))


def test_a_certificate_by_another_authority_of_the_same_name_is_refused():
    other = Authority.make(at=NOW)
    with pytest.raises(Invalid, match="signature"):
        Credential.verified(other.enrol("hospital", 6, at=NOW).credential.to_bytes(), at(NOW))
    with pytest.raises(Invalid, match="not the one of its certificate"):
        Authority.from_pem(formats.secret_to_pem(other.secret), MADE.trust.to_pem())


def test_fingerprints_are_compared_by_their_digits():
    key = ONE.credential.key
    shown = formats.fingerprint(key)
    assert shown.count(":") == 15
    assert formats.same_fingerprint(shown, key)
    assert formats.same_fingerprint(f" {shown.upper().replace(':', ' ')}\n", key)
    assert not formats.same_fingerprint(shown[:-1], key)  # no part of it will do
    assert not formats.same_fingerprint("", key)
    assert not formats.same_fingerprint(shown, MADE.trust.key)


# --- requests and their acceptance ----------------------------------------------------------------


def test_accept_does_not_believe_the_authority_in_the_file(keys, tmp_path):
    """Whoever carries the files could enrol the node with an authority of their own."""
    folder = tmp_path / "hospital"
    request = make_request(folder)
    thief = tmp_path / "thief"
    make_keys(thief, 0, at=NOW)
    certify(thief, request, read_request(request).fingerprint, at=NOW)
    right = load_trust(keys / AUTHORITY).fingerprint
    with pytest.raises(Invalid, match=r"fingerprint of the authority in .*telephone"):
        accept(folder, folder / CREDENTIAL, right, at=NOW)
    for said in ("", right[:9], load_trust(thief / AUTHORITY).fingerprint[:-1]):
        with pytest.raises(Invalid, match="was expected"):
            accept(folder, folder / CREDENTIAL, said, at=NOW)
    assert not (folder / IDENTITY).exists()
    assert (folder / SIGNING).exists()


def test_a_request_proves_that_its_sender_has_the_key(keys, tmp_path):
    folder = tmp_path / "hospital"
    request = make_request(folder)
    asked = read_request(request)
    assert asked.name == "hospital"
    # Another's public key, and a signature by one's own.
    own = Ed25519PrivateKey.generate()
    theirs = x509.load_pem_x509_csr(request.read_bytes()).public_bytes(Encoding.DER)
    forged = theirs[:-64] + own.sign(x509.load_der_x509_csr(theirs).tbs_certrequest_bytes)
    request.write_bytes(pem("CERTIFICATE REQUEST", forged))
    with pytest.raises(Invalid, match="signature of the request"):
        certify(keys, request, asked.fingerprint, at=NOW)
    assert not (folder / CREDENTIAL).exists()


def test_a_request_that_was_swapped_is_not_signed(keys, tmp_path):
    mine, theirs = make_request(tmp_path / "hospital"), make_request(tmp_path / "thief", "hospital")
    said = read_request(mine).fingerprint
    with pytest.raises(Invalid, match="swapped on the way"):
        certify(keys, theirs, said, at=NOW)
    with Register.open(keys / REGISTER, load_trust(keys / AUTHORITY)) as register:
        assert not register.of("hospital")


@pytest.mark.parametrize("kind", ["an elliptic curve", "no name", "two names", "an address"])
def test_requests_of_other_kinds_are_refused(keys, tmp_path, kind):
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "an elliptic curve" else (
        Ed25519PrivateKey.generate()
    )  # fmt: skip
    name = x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")
    where = x509.NameAttribute(x509.NameOID.LOCALITY_NAME, "here")
    names = {"no name": [], "two names": [name, name], "an address": [name, where]}.get(
        kind, [name]
    )
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(names))
    made = builder.sign(key, hashes.SHA256() if kind == "an elliptic curve" else None)
    (tmp_path / REQUEST).write_bytes(made.public_bytes(Encoding.PEM))
    with pytest.raises(Invalid, match=r"Ed25519|subject"):
        certify(keys, tmp_path / REQUEST, "", at=NOW)


def test_the_same_name_index_or_key_is_not_signed_twice(keys, tmp_path):
    request = make_request(tmp_path / "hospital")
    said = read_request(request).fingerprint
    assert certify(keys, request, said, at=NOW).index == 4  # the next that is free
    other = make_request(tmp_path / "other")
    told = read_request(other).fingerprint
    with pytest.raises(ValueError, match=r"'hospital' is in the register.*federation renew"):
        certify(keys, other, told, "hospital", 9, at=NOW)
    with pytest.raises(ValueError, match=r"index 4 is of 'hospital' in the register; 5 is free"):
        certify(keys, other, told, index=4, at=NOW)
    with pytest.raises(ValueError, match="certified before, for 'hospital'"):
        certify(keys, request, said, "twin", 9, at=NOW)
    evil = make_request(tmp_path / "evil", "$(touch here)")  # a request may ask for any name
    asked = read_request(evil).fingerprint
    certify(keys, evil, asked, at=NOW)
    with pytest.raises(ValueError, match=r"federation renew '\$\(touch here\)' hands out"):
        certify(keys, evil, asked, at=NOW)
    revoke(keys, ["hospital"], at=NOW)
    with pytest.raises(ValueError, match="'hospital' is in the register"):
        certify(keys, other, told, "hospital", at=NOW)
    assert certify(keys, other, told, at=NOW).index == 6


def test_nothing_is_signed_without_the_register_or_while_another_writes(keys, tmp_path):
    request = make_request(tmp_path / "hospital")
    said = read_request(request).fingerprint
    trust = load_trust(keys / AUTHORITY)
    with Register.open(keys / REGISTER, trust), pytest.raises(BusyError):
        certify(keys, request, said, at=NOW)
    other = Authority.make().trust
    with (
        pytest.raises(ValueError, match="another authority"),
        Register.open(keys / REGISTER, other),
    ):
        pass
    (keys / REGISTER).rename(keys / "elsewhere")
    with pytest.raises(ValueError, match="Restore it from a backup"):
        certify(keys, request, said, at=NOW)
    assert not (tmp_path / "hospital" / CREDENTIAL).exists()


def test_a_certificate_is_in_the_register_before_it_is_handed_out(keys, tmp_path, monkeypatch):
    request = make_request(tmp_path / "hospital")

    def full(path, content, mode=0o644):
        raise OSError("the disk is full")

    monkeypatch.setattr(enrolment, "write_whole", full)
    with pytest.raises(OSError, match="full"):
        certify(keys, request, read_request(request).fingerprint, at=NOW)
    monkeypatch.undo()
    said = described(keys / REGISTER, at=NOW)
    assert "'hospital', index 4" in said
    renew(keys, "hospital", tmp_path / "again", at=NOW)
    trust = load_trust(keys / AUTHORITY)
    made = accept(tmp_path / "hospital", tmp_path / "again", trust.fingerprint, at=NOW)
    assert made.index == 4


def test_a_credential_for_another_key_or_twice_is_refused(keys, tmp_path):
    folder, other = hospital(keys), tmp_path / "other"
    make_request(other)
    said = load_trust(keys / AUTHORITY).fingerprint
    with pytest.raises(Invalid, match="not the one of the credential"):
        accept(other, folder / CREDENTIAL, said, at=NOW)
    with pytest.raises(ValueError, match="make a request there"):
        accept(tmp_path, folder / CREDENTIAL, said, at=NOW)
    with pytest.raises(Invalid, match="is no credential"):
        accept(folder, keys / AUTHORITY, said, at=NOW)
    assert not (folder / SIGNING).exists()
    assert not (folder / REQUEST).exists()
    assert stat.S_IMODE((folder / IDENTITY).stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="needs a folder of its own"):
        make_request(folder, "another")


# --- revocation -----------------------------------------------------------------------------------


def test_a_revoked_node_is_refused_by_those_that_have_the_list(keys):
    folder = hospital(keys)
    path = revoke(keys, ["node-2", "hospital"], at=NOW)
    server = load_trust(keys / AUTHORITY, lambda: NOW)
    data = {i: identity_in(keys / f"node-{i}").credential.to_bytes() for i in (1, 2, 3)}
    assert Credential.verified(data[1], server).name == "node-1"
    with pytest.raises(Invalid, match="'node-2' was revoked"):
        Credential.verified(data[2], server)
    # The node itself, as soon as it has the list; those whose folders are here have it.
    assert load_identity(folder / IDENTITY, lambda: NOW).name == "hospital"
    accept_list(folder, path, at=NOW)
    with pytest.raises(Refused, match=r"hospital: .*revoked"):
        load_identity(folder / IDENTITY, lambda: NOW)
    with pytest.raises(Refused, match=r"node-1: .*renewed"):
        load_identity(keys / "node-1" / IDENTITY, lambda: NOW + 366 * DAY)
    assert (keys / "node-1" / REVOKED).read_bytes() == path.read_bytes()


def identity_in(folder: Path) -> Identity:
    return Identity.from_bytes((folder / IDENTITY).read_bytes())


def test_a_list_that_comes_while_a_process_runs_is_heeded(keys):
    data = identity_in(keys / "node-2").credential.to_bytes()
    trust = load_trust(keys / AUTHORITY, lambda: NOW)
    Credential.verified(data, trust)
    revoke(keys, at=NOW)
    Credential.verified(data, trust)
    revoke(keys, ["node-2"], at=NOW)
    with pytest.raises(Invalid, match="revoked"):
        Credential.verified(data, trust)


def list_of(keys: Path, when: datetime = NOW) -> RevocationFile:
    return RevocationFile(keys / REVOKED, load_trust(keys / AUTHORITY), lambda: when)


def test_a_list_only_becomes_newer(keys, tmp_path):
    first = revoke(keys, ["node-1"], at=NOW).read_bytes()
    second = revoke(keys, ["node-2"], at=NOW).read_bytes()
    node = keys / "node-3"
    revoked = RevocationFile(node / REVOKED, identity_in(node).authority, lambda: NOW)
    assert len(revoked.read().serials) == 2
    (node / REVOKED).write_bytes(first)
    with pytest.raises(Invalid, match="number 1, and number 2 was read before"):
        revoked()
    (tmp_path / "old").write_bytes(first)
    with pytest.raises(Invalid, match=r"number 1, and .* has number 2"):
        accept_list(node, tmp_path / "old", at=NOW)
    (node / REVOKED).unlink()
    with pytest.raises(Invalid, match="is gone"):
        revoked()
    (tmp_path / "new").write_bytes(second)
    assert accept_list(node, tmp_path / "new", at=NOW).number == 2
    assert len(revoked.read().serials) == 2


def test_an_older_list_that_was_read_before_is_not_taken_again(keys):
    """Moved away and back it has the same name, size, time and number in the file system."""
    revoke(keys, ["node-2"], at=NOW)
    assert list_of(keys)()
    (keys / REVOKED).rename(keys / "older")
    revoke(keys, ["node-3"], at=NOW)
    assert len(list_of(keys)()) == 2
    (keys / "older").rename(keys / REVOKED)
    with pytest.raises(Invalid, match="number 1, and number 2 was read before"):
        list_of(keys)()


def test_a_list_that_is_over_not_the_authority_s_or_none_at_all(keys, tmp_path):
    assert list(list_of(keys)()) == []  # nobody was ever revoked
    revoke(keys, ["node-1"], days=90, at=NOW)
    assert list_of(keys, NOW + 50 * DAY).soon() == ""
    assert "in 9 days" in list_of(keys, NOW + 81 * DAY).soon()
    with pytest.raises(Invalid, match=r"ended on 2031-08-02.*fpfl federation revoke"):
        list_of(keys, NOW + 91 * DAY)()
    revoke(keys, at=NOW + 91 * DAY)  # the same, signed anew
    assert len(list_of(keys, NOW + 91 * DAY).read().serials) == 1
    for wrong in (LISTED, b"", b"-----BEGIN X509 CRL-----\n-----END X509 CRL-----\n"):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(Invalid):
            accept_list(keys, tmp_path / "wrong", at=NOW)
        (keys / REVOKED).write_bytes(wrong)
        with pytest.raises(Invalid, match=REVOKED):
            list_of(keys)()
    with pytest.raises(ValueError, match="no identity"):
        accept_list(tmp_path, keys / REVOKED, at=NOW)
    with pytest.raises(ValueError, match=r"'nobody' is not in the register.*node-1"):
        revoke(keys, ["nobody"], at=NOW)


def test_where_the_newest_number_cannot_be_kept_the_log_says_so(keys, caplog, monkeypatch):
    revoke(keys, ["node-1"], at=NOW)
    (keys / f"{REVOKED}.numbers").mkdir()
    with caplog.at_level(logging.WARNING), pytest.raises(IsADirectoryError):
        list_of(keys)()
    (keys / f"{REVOKED}.numbers").rmdir()

    def full(*_):
        raise OSError("read-only")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        assert len(list_of(keys).read().serials) == 1
    assert "would not be noticed" in caplog.text


# --- renewal --------------------------------------------------------------------------------------


def test_a_node_is_renewed_with_the_key_that_it_has(keys, tmp_path):
    folder, trust = hospital(keys), load_trust(keys / AUTHORITY)
    before, later = identity_in(folder), NOW + 340 * DAY
    assert "in 25 days" in at(later).soon(before.credential)
    assert at(NOW).soon(before.credential) == ""
    renew(keys, "hospital", tmp_path / "new", at=later)
    made = accept(folder, tmp_path / "new", trust.fingerprint, at=later)
    assert (made.name, made.index, made.signing) == ("hospital", before.index, before.signing)
    assert made.credential.ends == later + 365 * DAY
    assert identity_in(folder) == made
    # The one of before, again: somebody sent the wrong file.
    with pytest.raises(Invalid, match="an older one"):
        accept(folder, folder / CREDENTIAL, trust.fingerprint, at=later)
    with pytest.raises(ValueError, match="give the node's request"):
        renew(keys, "hospital", tmp_path / "new", revoke_old=True, at=later)


def test_a_node_is_renewed_with_a_new_key_and_the_old_one_revoked(keys, tmp_path):
    folder, trust = hospital(keys), load_trust(keys / AUTHORITY)
    before = identity_in(folder)
    request = make_request(folder)
    asked = read_request(request)
    assert (asked.name, asked.index) == ("hospital", before.index)
    assert identity_in(folder) == before  # which serves meanwhile
    with pytest.raises(ValueError, match="a request was made and not accepted"):
        make_request(folder)
    with pytest.raises(Invalid, match="swapped"):
        renew(keys, "hospital", tmp_path / "new", request, before.credential.fingerprint, at=NOW)
    renew(
        keys, "hospital", tmp_path / "new", request, asked.fingerprint, revoke_old=True, at=NOW
    )  # fmt: skip
    made = accept(folder, tmp_path / "new", trust.fingerprint, at=NOW)
    assert (made.name, made.index) == ("hospital", before.index)
    assert made.signing != before.signing
    assert not (folder / SIGNING).exists()
    heeding = at(NOW, trust, revoked=list_of(keys))
    Credential.verified(made.credential.to_bytes(), heeding)
    with pytest.raises(Invalid, match="revoked"):
        Credential.verified(before.credential.to_bytes(), heeding)


def test_a_revoked_node_comes_back_with_a_new_key_alone(keys, tmp_path):
    folder, trust = hospital(keys), load_trust(keys / AUTHORITY)
    revoke(keys, ["hospital"], at=NOW)
    with pytest.raises(ValueError, match="make a new one"):
        renew(keys, "hospital", tmp_path / "new", at=NOW)
    old = tmp_path / "old"
    old.write_bytes(formats.make_request(identity_in(folder).signing, "hospital", 4))
    with pytest.raises(ValueError, match="was revoked"):
        renew(keys, "hospital", tmp_path / "new", old, read_request(old).fingerprint, at=NOW)
    request = make_request(folder)
    renew(keys, "hospital", tmp_path / "new", request, read_request(request).fingerprint, at=NOW)
    made = accept(folder, tmp_path / "new", trust.fingerprint, at=NOW)
    Credential.verified(made.credential.to_bytes(), at(NOW, trust, revoked=list_of(keys)))


def test_another_s_credential_does_not_replace_an_identity(keys, tmp_path):
    folder, trust = hospital(keys), load_trust(keys / AUTHORITY)
    renew(keys, "node-1", tmp_path / "new", at=NOW)
    with pytest.raises(Invalid, match="is 'hospital' with index 4"):
        accept(folder, tmp_path / "new", trust.fingerprint, at=NOW)


def test_a_server_s_certificate_is_renewed_by_the_root_that_nodes_have(keys):
    before = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    root = (keys / "ca.pem").read_bytes()
    ends = transport.renew_server(keys, at=NOW + 300 * DAY)
    after = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    assert ends == after.not_valid_after_utc == NOW + 665 * DAY
    after.verify_directly_issued_by(x509.load_pem_x509_certificate(root))
    assert (keys / "ca.pem").read_bytes() == root
    kind = x509.SubjectAlternativeName
    assert after.extensions.get_extension_for_class(kind) == (
        before.extensions.get_extension_for_class(kind)
    )
    transport.renew_server(keys, ("fl.example",), at=NOW)
    assert "fl.example" in str(
        x509.load_pem_x509_certificate((keys / "server.pem").read_bytes()).extensions
    )
    (keys / "ca.secret").unlink()
    with pytest.raises(ValueError, match=r"ca\.secret is not there"):
        transport.renew_server(keys)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_node_with_the_root_meets_the_server(tmp_path, renewed):
    """TLS as such, without a network: the certificate is for the names, and by the root."""
    make_keys(tmp_path / "keys", 0, ("localhost", "127.0.0.1"))
    place = tmp_path / "keys"
    root = (place / "ca.pem").read_text()
    if renewed:
        transport.renew_server(place)

    def meet(host: str) -> None:
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(place / "server.pem", place / "server.key")
        client = ssl.create_default_context(cadata=root)
        sides = [
            client.wrap_bio(back, there, server_hostname=host),
            server.wrap_bio(there, back, server_side=True),
        ]
        for _ in range(3):
            for side in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        assert sides[0].version()

    meet("localhost")
    meet("127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        meet("fl.example")


# --- whole folders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [("münchen.example",), ("a" * 64 + ".example",), ("a b",), ("-a",), ("",), ()]
)
def test_keys_that_cannot_be_made_leave_nothing_behind(tmp_path, hosts):
    with pytest.raises(ValueError, match="host"):
        make_keys(tmp_path / "new" / "keys", 3, hosts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", range(1, 9))
def test_a_disk_that_fails_on_the_way_leaves_nothing_behind(tmp_path, monkeypatch, call):
    (tmp_path / "keys").mkdir()
    real, calls = enrolment.write_whole, []

    def failing(path, content, mode=0o644):
        calls.append(path)
        if len(calls) == call:
            raise OSError("the disk is full")
        real(path, content, mode)

    monkeypatch.setattr(enrolment, "write_whole", failing)
    monkeypatch.setattr(transport, "write_whole", failing)
    with pytest.raises(OSError, match="full"):
        make_keys(tmp_path / "keys", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    assert list((tmp_path / "keys").iterdir()) == []


@pytest.mark.parametrize("call", range(1, 5))
def test_a_request_is_whole_or_not_there(tmp_path, monkeypatch, call):
    real, calls = enrolment.write_whole, []

    def failing(path, content, mode=0o644):
        calls.append(path)
        if len(calls) == call:
            raise OSError("the disk is full")
        real(path, content, mode)

    monkeypatch.setattr(enrolment, "write_whole", failing)
    monkeypatch.setattr(transport, "write_whole", failing)
    with pytest.raises(OSError, match="full"):
        make_request(tmp_path / "node")
    assert list(tmp_path.iterdir()) == []


def test_a_long_host_name_is_a_host_name(tmp_path):
    """A common name has 64 characters at most: such a host left half a folder of keys."""
    host = ".".join(["a" * 50, "b" * 50, "example"])
    make_keys(tmp_path / "keys", 3, (host,))
    server = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host, "localhost"]
    assert (tmp_path / "keys" / "node-3" / "supernode.pub").is_file()
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_node_s_name_fits_a_certificate(tmp_path):
    for name in ("x" * 65, "", "a\nb", " a"):
        with pytest.raises(ValueError, match="1 to 64 characters"):
            make_request(tmp_path / "node", name)
    assert list(tmp_path.iterdir()) == []
    assert read_request(make_request(tmp_path / "node", "Universitätsklinikum, 3")).name == (
        "Universitätsklinikum, 3"
    )


# --- looking at files -----------------------------------------------------------------------------


def test_every_file_can_be_looked_at_and_shows_no_secret(keys, tmp_path):
    folder, trust = hospital(keys), load_trust(keys / AUTHORITY)
    request = make_request(tmp_path / "other")
    revoke(keys, ["node-2"], at=NOW)
    own = identity_in(folder).credential
    serial = f"{identity_in(keys / 'node-2').credential.serial:x}"
    found = {
        path: "\n".join(described(path, at=NOW + 400 * DAY))
        for path in (
            request, folder / IDENTITY, folder / CREDENTIAL, keys / AUTHORITY, keys / REGISTER,
            keys / REVOKED,
        )
    }  # fmt: skip
    assert "request of 'other'" in found[request]
    assert read_request(request).fingerprint in found[request]
    for path in (folder / IDENTITY, folder / CREDENTIAL, keys / REGISTER):
        assert "'hospital', index 4" in found[path]
        assert own.fingerprint in found[path]
        assert "to 2032-05-03 03:02 UTC, which is over" in found[path]
    assert trust.fingerprint in found[keys / AUTHORITY]
    assert f"{serial} revoked 2031-05-04" in found[keys / REVOKED]
    assert "revoked" in found[keys / REGISTER]
    secret = identity_in(folder).signing.hex()
    assert not any(secret in text for text in found.values())
    for wrong in (keys / SECRET, keys / "node-1" / "supernode"):
        with pytest.raises(ValueError, match="is none of"):
            described(wrong)


def test_the_log_says_a_month_ahead_what_ends(keys):
    identity = identity_in(keys / "node-1")
    revoke(keys, ["node-2"], at=NOW + 300 * DAY, days=50)
    soon = NOW + 340 * DAY
    watched = replace(identity.authority, clock=lambda: soon, revoked=list_of(keys, soon))
    said = enrolment.ending(watched, identity.credential)
    assert [line.split(" ends on ")[0] for line in said] == [
        "the certificate of 'node-1'",
        f"the list {keys / REVOKED}",
    ]
    assert enrolment.ending(at(NOW), identity.credential) == []


OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(OPENSSL is None, reason="there is no openssl here to read the files with")
def test_openssl_reads_and_verifies_what_we_write(keys, tmp_path):
    def openssl(*words: str | Path) -> str:
        done = subprocess.run(
            [str(OPENSSL), *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    folder = hospital(keys)
    path = revoke(keys, ["node-2"], at=NOW)
    request = make_request(tmp_path / "other")
    said = openssl("req", "-in", request, "-noout", "-text", "-verify")
    assert "CN = other" in said
    assert "ok" in said.lower().replace("verify ok", "ok")
    said = openssl("x509", "-in", folder / IDENTITY, "-noout", "-subject", "-enddate")
    assert "CN = hospital, serialNumber = 4" in said
    assert "May  3 03:02:01 2032" in said
    when = ("-attime", str(int(NOW.timestamp())))
    authority = ("-CAfile", keys / AUTHORITY)
    assert "OK" in openssl("verify", *when, *authority, folder / IDENTITY)
    assert "OK" in openssl("crl", "-in", path, *authority, "-noout")
    heeding = ("-crl_check", "-CRLfile", path)
    openssl("verify", *when, *authority, *heeding, folder / IDENTITY)
    refused = subprocess.run(
        [str(OPENSSL), "verify", *when, *map(str, authority), *map(str, heeding),
         str(keys / "node-2" / IDENTITY)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "revoked" in refused.stdout + refused.stderr
    made = openssl("pkey", "-in", tmp_path / "other" / SIGNING, "-noout", "-text")
    assert "ED25519" in made.upper()


def test_a_request_that_openssl_made_is_signed(keys, tmp_path):
    """The published format in the other direction: no tool of ours is needed on a node."""
    if OPENSSL is None:
        pytest.skip("there is no openssl here to make a request with")
    folder = tmp_path / "lab"
    folder.mkdir()
    made = ["genpkey", "-algorithm", "ed25519", "-out", str(folder / SIGNING)]
    asked = ["req", "-new", "-key", str(folder / SIGNING), "-subj", "/CN=lab",
             "-out", str(folder / REQUEST)]  # fmt: skip
    for words in (made, asked):
        subprocess.run([OPENSSL, *words], check=True, capture_output=True)
    said = read_request(folder / REQUEST).fingerprint
    certify(keys, folder / REQUEST, said, at=NOW)
    made_of = accept(folder, folder / CREDENTIAL, load_trust(keys / AUTHORITY).fingerprint, at=NOW)
    assert public_of_signing(made_of.signing) == made_of.credential.key
    assert made_of.name == "lab"
