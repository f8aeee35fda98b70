"""A federation's project: a Flower project that is ready to run, and its keys.

KEYS/authority.secret          enrols nodes; keep it off the network
KEYS/authority.key             its public half, for the server
KEYS/ca.pem server.pem server.key    TLS: the root for everybody, the rest for the SuperLink
KEYS/node-1/identity           who the node is in secure aggregation: for this node alone
KEYS/node-1/supernode(.pub)    who it is to Flower: the key, and what is registered

Where nobody but a node may ever have its keys, the node makes them (`make_request`), the authority
signs the public half (`certify`), and the node puts the two together (`accept`).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shlex
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fpfl.federation.quoting import printable, toml
from fpfl.federation.secagg import Authority, Credential, Identity
from fpfl.federation.secagg.primitives import KEY_BYTES, join, public_of_signing, split
from fpfl.store.files import write_whole

IDENTITY, SUPERNODE = "identity", "supernode"
SIGNING, REQUEST, CREDENTIAL = "signing.secret", "request", "credential"
SECRET, AUTHORITY = "authority.secret", "authority.key"
ROOT, SERVER, SERVER_KEY = "ca.pem", "server.pem", "server.key"
DAYS = 365

_PEM, _NOBODY = serialization.Encoding.PEM, serialization.NoEncryption()


def make_keys(folder: Path, nodes: int, hosts: tuple[str, ...] = ("127.0.0.1",)) -> None:
    """Make all keys of a federation in a new folder.

    Parameters
    ----------
    folder
        Where to; nothing may be there yet.
    nodes
        How many nodes are enrolled, as ``node-1`` and so on.
    hosts
        Names or addresses that the SuperLink is reached by.
    """
    if nodes < 3:
        raise ValueError(f"nodes is {nodes}; a federation needs at least 3")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = Authority.make()
    write_whole(folder / SECRET, authority.secret, mode=0o600)
    write_whole(folder / AUTHORITY, authority.key)
    make_certificates(folder, hosts)
    for number in range(1, nodes + 1):
        place = folder / f"node-{number}"
        place.mkdir(mode=0o700)
        identity = authority.enrol(f"node-{number}", number)
        write_whole(place / IDENTITY, identity.to_bytes(), mode=0o600)
        make_supernode_key(place / SUPERNODE)


def make_request(folder: Path) -> Path:
    """A node's own keys in a new folder; the file with the public half, for the authority."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = os.urandom(KEY_BYTES)
    write_whole(folder / SIGNING, secret, mode=0o600)
    make_supernode_key(folder / SUPERNODE)
    write_whole(folder / REQUEST, public_of_signing(secret))
    return folder / REQUEST


def certify(keys: Path, request: Path, name: str, index: int) -> Path:
    """The authority's side: a credential for a node's public key, beside the request.

    No name and no index may be given out twice; that is for whoever calls this to see to.
    """
    key = request.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{request} has {len(key)} bytes; a request has {KEY_BYTES}")
    authority = Authority((keys / SECRET).read_bytes())
    path = request.with_name(CREDENTIAL)
    write_whole(path, join(authority.certify(name, index, key).to_bytes(), authority.key))
    return path


def accept(folder: Path, credential: Path) -> Identity:
    """The node's side: its identity, from its own key and the credential that came back."""
    found, authority = split(credential.read_bytes(), 2)
    signing = (folder / SIGNING).read_bytes()
    identity = Identity(Credential.verified(found, authority), authority, signing)
    Identity.from_bytes(identity.to_bytes())  # refuses a credential for another key
    write_whole(folder / IDENTITY, identity.to_bytes(), mode=0o600)
    (folder / SIGNING).unlink()
    return identity


def make_supernode_key(path: Path) -> None:
    """A node's key pair as Flower wants it: P-384 in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _NOBODY)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_whole(path, private, mode=0o600)
    write_whole(path.with_name(f"{path.name}.pub"), public)


def make_certificates(folder: Path, hosts: tuple[str, ...]) -> None:
    """A root, which is used once and forgotten, and the server's certificate by it.

    It is for this machine's own names, too: proxy, operator and Flower's processes use those.
    """
    hosts = tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1")))
    root, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = "fpfl federation"
    ca = _certificate(name, root, name, authority=True).sign(root, hashes.SHA256())
    leaf = (
        _certificate(hosts[0], server, name, authority=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), False)
        .sign(root, hashes.SHA256())
    )
    write_whole(folder / ROOT, ca.public_bytes(_PEM))
    write_whole(folder / SERVER, leaf.public_bytes(_PEM))
    secret = server.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _NOBODY)
    write_whole(folder / SERVER_KEY, secret, mode=0o600)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, *, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
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
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(limits, True)
        .add_extension(usage, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "server_app.py": "{package}/server_app.py",
    "client_app.py": "{package}/client_app.py",
    "task.py": "{package}/task.py",
}
_VALUE = re.compile(r"{([a-z]+)}")
# A path may have quotes in it, and whoever reads these files takes them for the path's end.
_ESCAPED: dict[str, Callable[[str], str]] = {".toml": toml, ".md": shlex.quote}


def make_project(
    folder: Path, keys: Path, *, nodes: int, cohort: int, rounds: int, epsilon: float
) -> list[Path]:
    """Write a project into a new folder; the files that were written.

    Parameters
    ----------
    folder
        The new folder; its name is the project's.
    keys
        Where the keys are, or will be.
    nodes, cohort, rounds, epsilon
        What its agreement begins with.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise ValueError(f"{folder.name!r} is no name for a project; begin it with a letter")
    package = name.replace("-", "_")
    if find_spec(package) is not None:
        raise ValueError(f"there is a package {package!r} already; name the project otherwise")
    if nodes < 3:
        raise ValueError(f"nodes is {nodes}; a federation needs at least 3")
    paths = {
        "keys": keys.resolve().as_posix(),
        "authority": (keys.resolve() / AUTHORITY).as_posix(),
        "folder": (folder.resolve().parent / f"{name}-run").as_posix(),
    }
    values = {
        "name": name,
        "package": package,
        "nodes": str(nodes),
        "cohort": str(cohort),
        "rounds": str(rounds),
        "epsilon": f"{epsilon:g}",
    }
    for text in paths.values():
        printable(text)
    written = []
    templates = resources.files("fpfl.federation") / "template"
    (folder / package).mkdir(parents=True)
    for source, target in _FILES.items():
        template = (templates / f"{source}.txt").read_text(encoding="utf-8")
        path = folder / target.format(package=package)
        escaped = _ESCAPED.get(path.suffix, str)
        filling = values | {each: escaped(text) for each, text in paths.items()}
        write_whole(path, _filled(template, filling).encode())
        written.append(path)
    write_whole(folder / package / "__init__.py", b"")
    return written


def _filled(template: str, values: dict[str, str]) -> str:
    """A template with values for ``{name}``; what has no value stays as it is."""
    return _VALUE.sub(lambda found: values.get(found[1], found[0]), template)
