"""What TLS and Flower's node authentication need: a root, the server's certificate, nodes' keys.

The root's key is kept, offline beside the authority's secret. The server's certificate counts for a
year, and a new one by the same root asks nothing of the nodes; a root that was forgotten would have
all of them visited. Who steals it can pose as the server to nodes, as with ``server.key``: secure
aggregation does not rest on who the server is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fpfl.federation.secagg.certificates import now
from fpfl.federation.secagg.identity import AUTHORITY_DAYS, DAYS
from fpfl.store.files import write_whole

ROOT, ROOT_KEY = "ca.pem", "ca.secret"
SERVER, SERVER_KEY = "server.pem", "server.key"
SUPERNODE = "supernode"

HERE = ("localhost", "127.0.0.1")

_PEM, _NOBODY = serialization.Encoding.PEM, serialization.NoEncryption()
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def make_certificates(folder: Path, hosts: Sequence[str], at: datetime | None = None) -> None:
    """A root, and the server's certificate by it, into a folder.

    Parameters
    ----------
    folder
        Where to.
    hosts
        Names or addresses that the server is reached by.
    at
        From when on they count; by default now.
    """
    names = host_names(hosts)
    root, name = ec.generate_private_key(ec.SECP256R1()), _name("fpfl federation")
    ca = _certificate(name, root, name, AUTHORITY_DAYS, at, authority=True)
    write_whole(folder / ROOT, ca.sign(root, hashes.SHA256()).public_bytes(_PEM))
    write_whole(folder / ROOT_KEY, _secret(root), mode=0o600)
    _make_server(folder, names, at)


def renew_server(keys: Path, hosts: Sequence[str] = (), at: datetime | None = None) -> datetime:
    """A new key and certificate for the server, by the root that nodes have; when it ends.

    Parameters
    ----------
    keys
        The folder with the root, its key, and the server's certificate.
    hosts
        As in `make_certificates`; by default those of the certificate that is there.
    at
        From when on it counts; by default now.
    """
    if not (keys / ROOT_KEY).is_file():
        raise ValueError(
            f"{keys / ROOT_KEY} is not there: a server's certificate is renewed where the root's "
            "key is. Keys that fpfl 0.1 made have none: make new ones, fpfl federation keys"
        )
    if hosts:
        names = host_names(hosts)
    else:
        before = x509.load_pem_x509_certificate((keys / SERVER).read_bytes())
        known = before.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = list(known.value)
    return _make_server(keys, names, at)


def _make_server(folder: Path, names: list[x509.GeneralName], at: datetime | None) -> datetime:
    ca = x509.load_pem_x509_certificate((folder / ROOT).read_bytes())
    root = serialization.load_pem_private_key((folder / ROOT_KEY).read_bytes(), None)
    assert isinstance(root, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has 64 characters at most and hosts may have more; they are read from the names.
    leaf = (
        _certificate(_name("fpfl server"), key, ca.subject, DAYS, at, authority=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False
        )
        .sign(root, hashes.SHA256())
    )
    write_whole(folder / SERVER_KEY, _secret(key), mode=0o600)
    write_whole(folder / SERVER, leaf.public_bytes(_PEM))
    ends: datetime = leaf.not_valid_after_utc
    return ends


def make_supernode_key(path: Path) -> None:
    """A node's key pair as Flower wants it: P-384 in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _NOBODY)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_whole(path, private, mode=0o600)
    write_whole(path.with_name(f"{path.name}.pub"), public)


def host_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Names and addresses as a certificate has them; an error where one cannot be."""
    if not hosts:
        raise ValueError("no host is given: name at least one that the server is reached by")
    # This machine's own, too: the proxy, its operator and Flower's processes come by those.
    return [_host(host) for host in dict.fromkeys((*hosts, *HERE))]


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        labels = text.removeprefix("*.").split(".")
        if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            raise ValueError(
                f"{text!r} is no name of a host: expected an address, or a name of letters, digits "
                "and hyphens between dots, up to 63 in each part and 253 in all (others as "
                "xn--...)"
            ) from None
        return x509.DNSName(text)


def _secret(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _NOBODY)
    return pem


def _certificate(
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    days: int,
    at: datetime | None,
    *,
    authority: bool,
) -> x509.CertificateBuilder:
    at = at or now()
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
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - timedelta(hours=1))
        .not_valid_after(at + timedelta(days=days))
        .add_extension(limits, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
