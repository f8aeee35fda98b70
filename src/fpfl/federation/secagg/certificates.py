"""X.509 with Ed25519: certificates, requests for them (PKCS #10), and lists of the revoked (CRL).

    certificate   a node's name (common name), its index (serial number of the subject), its key
    request       the same two as the node would have them, signed with the key: it has the key
    list          serial numbers of certificates that count no longer, with a number of its own

All of it can be read with ``openssl x509``, ``req`` and ``crl``. What is signed begins with another
byte than what nodes sign in sessions: no signature of the one kind can be taken for the other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fpfl.federation.secagg.primitives import KEY_BYTES, SIGNATURE_BYTES, Invalid, verify
from fpfl.federation.secagg.shamir import LARGEST_INDEX

LONGEST_NAME = 64
"""Characters in a common name, by X.520."""

SERIAL_BYTES = 20

ISSUER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fpfl federation authority")])

# Before every signature with Ed25519: the algorithm, and that a string of 64 bytes follows.
_ENDS = bytes.fromhex("300506032b6570034100")
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.+?-----END \1-----", re.S)
_BROKEN = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)


# --- keys -----------------------------------------------------------------------------------------


def fingerprint(key: bytes) -> str:
    """SHA-256 of an Ed25519 key (its SubjectPublicKeyInfo), as people compare it.

    ``openssl pkey -pubout -outform DER | openssl dgst -sha256`` gives the same digits.
    """
    info = Ed25519PublicKey.from_public_bytes(key).public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    digits = hashlib.sha256(info).hexdigest()
    return ":".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def same_fingerprint(given: str, key: bytes) -> bool:
    """Whether these are the digits of the key's fingerprint, however they are grouped."""
    digits = re.sub(r"[\s:.-]+", "", given).lower()
    return digits == fingerprint(key).replace(":", "")


def secret_to_pem(secret: bytes) -> bytes:
    """An Ed25519 secret key as PKCS #8, not encrypted."""
    key = Ed25519PrivateKey.from_private_bytes(secret)
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def secret_from_pem(data: bytes) -> bytes:
    """Undo :func:`secret_to_pem`."""
    try:
        key = load_pem_private_key(data, None)
    except _BROKEN:
        raise Invalid("this is no secret key in PEM.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise Invalid("this secret key is of another kind than Ed25519.")
    secret: bytes = key.private_bytes_raw()
    return secret


# --- PEM ------------------------------------------------------------------------------------------


def blocks(data: bytes) -> list[tuple[str, bytes]]:
    """What a PEM file holds: each block's kind, and the block."""
    return [(found[1].decode(), found[0] + b"\n") for found in _BLOCK.finditer(data)]


def certificate_to_pem(data: bytes) -> bytes:
    """A certificate's bytes as PEM."""
    pem: bytes = x509.load_der_x509_certificate(data).public_bytes(Encoding.PEM)
    return pem


def certificates_from_pem(data: bytes) -> list[bytes]:
    """The certificates of a PEM file, as bytes; none where there are none."""
    found = [block for kind, block in blocks(data) if kind == "CERTIFICATE"]
    with _reading("a certificate"):
        return [x509.load_pem_x509_certificate(one).public_bytes(Encoding.DER) for one in found]


# --- names ----------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raise where a node cannot be called so."""
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"a name must have 1 to {LONGEST_NAME} characters that can be printed, no space first "
            f"or last, but got {name!r}."
        )


def check_index(index: int) -> None:
    """Raise where a node cannot have this index."""
    if not 1 <= index <= LARGEST_INDEX:
        raise ValueError(f"an index must be from 1 to {LARGEST_INDEX}, but got {index!r}.")


def subject(name: str, index: int | None) -> x509.Name:
    """A node's name, with its index where it has one."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if index is not None:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, str(index)))
    return x509.Name(attributes)


def read_subject(found: x509.Name) -> tuple[str, int | None]:
    """Undo :func:`subject`; :class:`Invalid` for any other name."""
    names = [str(one.value) for one in found.get_attributes_for_oid(NameOID.COMMON_NAME)]
    numbers = [str(one.value) for one in found.get_attributes_for_oid(NameOID.SERIAL_NUMBER)]
    if len(names) != 1 or len(numbers) > 1 or not all(one.isdecimal() for one in numbers):
        raise Invalid("the subject must have one common name and a node's index as serial number.")
    index = int(numbers[0]) if numbers else None
    try:
        check_name(names[0])
        if index is not None:
            check_index(index)
    except ValueError as error:
        raise Invalid(str(error)) from None
    if found != subject(names[0], index):
        raise Invalid("the subject has more than a name and an index, or writes them otherwise.")
    return names[0], index


# --- what is signed -------------------------------------------------------------------------------


def check_signature(data: bytes, key: bytes, what: str) -> None:
    """Whether ``key`` signed it, and every byte of it is what that signature is of.

    X.509 leaves room beside what is signed: how a length is written, bits that are not used. Here
    there is one way to write each. So nothing has to be read in order to see that it is signed, and
    of others' bytes only those are read that the authority has signed.
    """
    ends = len(data) - SIGNATURE_BYTES
    begins = next(
        (n for n in range(2, min(6, len(data))) if data[:n] == b"\x30" + _length(len(data) - n)), 0
    )
    if not begins or data[begins:ends][-len(_ENDS) :] != _ENDS:
        raise Invalid(f"{what} is cut off, or has other bytes around its signature than it should.")
    verify(key, data[ends:], data[begins : ends - len(_ENDS)], what)


def _length(n: int) -> bytes:
    """As DER writes it."""
    if n < 128:
        return bytes([n])
    size = n.to_bytes((n.bit_length() + 7) // 8, "big")
    return bytes([128 | len(size)]) + size


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Whatever a format objects to is :class:`Invalid`, also where warnings are errors."""
    try:
        yield
    except Invalid:
        raise
    except (*_BROKEN, Warning):
        raise Invalid(f"{what} cannot be read: it was cut off or changed.") from None


def load_certificate(data: bytes, key: bytes | None) -> x509.Certificate:
    """A certificate that ``key`` signed, or without one that its own key did."""
    if data[:1] == b"\0":
        raise Invalid(
            "a credential of fpfl 0.1, which knew neither expiry nor revocation, is taken no "
            "longer: enrol the node anew with this version (fpfl federation request, certify, "
            "accept)."
        )
    if key is not None:
        check_signature(data, key, "a credential by the authority")
    with _reading("a certificate"):
        found = x509.load_der_x509_certificate(data)
    if key is None:
        check_signature(data, read_key(found), "the authority's certificate, by itself,")
    return found


def read_key(found: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    """The Ed25519 key that a certificate or a request is of."""
    with _reading("the key of a certificate or request"):
        key = found.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise Invalid("its key is of another kind than Ed25519.")
    raw: bytes = key.public_bytes_raw()
    return raw


def check_extensions(found: x509.Certificate, *, authority: bool) -> None:
    """Whether a certificate says that it is an authority's, or a node's, and demands no more."""
    with _reading("what a certificate says of itself"):
        extensions = list(found.extensions)
    critical = {one.oid: one.value for one in extensions if one.critical}
    limits = critical.pop(x509.BasicConstraints.oid, None)
    usage = critical.pop(x509.KeyUsage.oid, None)
    if not isinstance(limits, x509.BasicConstraints) or limits.ca != authority:
        raise Invalid("a certificate must say of itself whether it is an authority's or a node's.")
    if not isinstance(usage, x509.KeyUsage) or not (
        usage.key_cert_sign if authority else usage.digital_signature
    ):
        raise Invalid("a certificate does not allow what its key is used for here.")
    if critical:
        raise Invalid("a certificate demands more than this version knows (critical extensions).")


def sign_certificate(
    secret: bytes,
    key: bytes,
    named: x509.Name,
    dates: tuple[datetime, datetime],
    serial: int,
    *,
    authority: bool,
) -> bytes:
    """A certificate for ``key``, which is called ``named``, by an authority's ``secret``."""
    signing, public = Ed25519PrivateKey.from_private_bytes(secret), Ed25519PublicKey
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    limits = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    certified = public.from_public_bytes(key)
    made: bytes = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(ISSUER)
        .public_key(certified)
        .serial_number(serial)
        .not_valid_before(dates[0])
        .not_valid_after(dates[1])
        .add_extension(limits, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(certified), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(signing, None)
        .public_bytes(Encoding.DER)
    )
    return made


def make_request(secret: bytes, name: str, index: int | None = None) -> bytes:
    """A request (PKCS #10, PEM) for the key of ``secret``, signed with it."""
    check_name(name)
    key = Ed25519PrivateKey.from_private_bytes(secret)
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(name, index))
    pem: bytes = builder.sign(key, None).public_bytes(Encoding.PEM)
    return pem


def read_request(data: bytes) -> tuple[str, int | None, bytes]:
    """The name and index that a request asks for, and its key, whose owner signed it."""
    if len(data) == KEY_BYTES:
        raise Invalid(
            "this is a request of fpfl 0.1, which does not prove that its sender has the key: let "
            "the node make another with this version, fpfl federation request."
        )
    if [kind for kind, _ in blocks(data)] != ["CERTIFICATE REQUEST"]:
        raise Invalid("this is no request: give the file that fpfl federation request wrote.")
    with _reading("this request"):
        found = x509.load_pem_x509_csr(data)
        named = found.subject
    key = read_key(found)
    check_signature(found.public_bytes(Encoding.DER), key, "the request, by its own key,")
    return *read_subject(named), key


def sign_list(
    secret: bytes,
    revoked: Iterable[tuple[int, datetime]],
    number: int,
    dates: tuple[datetime, datetime],
) -> bytes:
    """A list (PEM) of serial numbers and when each was revoked."""
    key = Ed25519PrivateKey.from_private_bytes(secret)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ISSUER)
        .last_update(dates[0])
        .next_update(dates[1])
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
    )
    for serial, when in revoked:
        one = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
        builder = builder.add_revoked_certificate(one.build())
    pem: bytes = builder.sign(key, None).public_bytes(Encoding.PEM)
    return pem


def read_list(data: bytes, key: bytes) -> tuple[int, datetime, datetime, dict[int, datetime]]:
    """A list's number, when it was signed, until when it holds, and what it revokes.

    :class:`Invalid` unless the owner of ``key`` signed it.
    """
    if [kind for kind, _ in blocks(data)] != ["X509 CRL"]:
        raise Invalid("this is no list: give the file that fpfl federation revoke wrote.")
    with _reading("this list"):
        found = x509.load_pem_x509_crl(data)
        check_signature(found.public_bytes(Encoding.DER), key, "the list by the authority")
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        revoked = {one.serial_number: one.revocation_date_utc for one in found}
    if any(one.critical for one in found.extensions) or found.next_update_utc is None:
        raise Invalid("this list demands more than this version knows, or has no end.")
    return number, found.last_update_utc, found.next_update_utc, revoked


def now() -> datetime:
    """The time, in whole seconds, as certificates have it."""
    return datetime.now(UTC).replace(microsecond=0)
