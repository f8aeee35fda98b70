"""``fpfl federation``: a project, its keys, and the commands that start it."""

from __future__ import annotations

import ast
import ipaddress
import shlex
import stat
import subprocess
import tomllib
from importlib import import_module

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fpfl[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fpfl import federation
from fpfl.cli import app
from fpfl.cli import federation as cli_federation
from fpfl.federation.enrolment import load_trust, make_keys
from fpfl.federation.project import make_project
from fpfl.federation.secagg import Credential, Identity


def called(*words: str, typed: str = "") -> str:
    result = CliRunner().invoke(app, ["federation", *words], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_project_that_is_ready_to_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = called("init", "My first-Federation", "--nodes", "4", "--rounds", "7", "--epsilon", "3")
    assert "fpfl federation keys keys --nodes 4" in said
    project = tmp_path / "My first-Federation"
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    flower = settings["tool"]["flwr"]["app"]
    assert settings["project"]["name"] == "my-first-federation"
    for component, name in flower["components"].items():
        module, _, variable = name.partition(":")
        path = project / f"{module.replace('.', '/')}.py"
        assert variable == "app", component
        ast.parse(path.read_text())
    assert flower["config"]["authority"] == str(tmp_path / "keys" / "authority.key")
    assert "{" not in (project / "pyproject.toml").read_text()
    monkeypatch.syspath_prepend(str(project))
    task = import_module("my_first_federation.task")
    agreed = task.agreement()
    assert (agreed.nodes, agreed.rounds, agreed.plan.convention) == (4, 7, "coins")
    assert agreed.plan.epsilon == pytest.approx(3.0, rel=1e-3)
    parts = [task.load({"partition-id": i}) for i in range(4)]
    assert sum(part.population for part in parts) == agreed.population
    assert import_module("my_first_federation.client_app").app is not None
    assert import_module("my_first_federation.server_app").app is not None


def test_keys_are_whole_private_and_each_node_s_own(tmp_path):
    folder = tmp_path / "keys"
    assert "off the network" in called("keys", str(folder), "--nodes", "3", "--host", "fl.example")
    authority = load_trust(folder / "authority.key")
    identities = [
        Identity.from_bytes((folder / f"node-{i}" / "identity").read_bytes()) for i in (1, 2, 3)
    ]
    assert [each.name for each in identities] == ["node-1", "node-2", "node-3"]
    assert len({each.signing for each in identities}) == 3
    for each in identities:
        assert Credential.verified(each.credential.to_bytes(), authority).index == each.index
    for i in (1, 2, 3):
        place = folder / f"node-{i}"
        private = load_ssh_private_key((place / "supernode").read_bytes(), None)
        public = load_ssh_public_key((place / "supernode.pub").read_bytes())
        assert private.public_key().public_numbers() == public.public_numbers()
        assert public.curve.name == "secp384r1"
    secrets = [
        "authority.secret",
        "ca.secret",
        "register.jsonl",
        "server.key",
        "node-1/identity",
        "node-1/supernode",
    ]
    for name in secrets:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    root = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example", "localhost"]
    make_keys(tmp_path / "others", 3, ("10.0.0.1",))
    other = x509.load_pem_x509_certificate((tmp_path / "others" / "server.pem").read_bytes())
    names = other.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.0.0.1") in names.get_values_for_type(x509.IPAddress)


def test_a_node_can_make_its_own_keys(tmp_path, monkeypatch):
    """With both fingerprints asked for; as docs/federation.md has the commands."""
    monkeypatch.chdir(tmp_path)
    fingerprint = called("keys", "keys", "--nodes", "3").split("for every node: ")[1].split()[0]
    asked = called("request", "hospital")
    assert "to the authority" in asked
    request = asked.split()[-1]
    called("request", "other")
    # Nobody says yes: nothing is signed. Nor where the node read another one.
    with pytest.raises(AssertionError, match=request):
        called("certify", "hospital/request", typed="n\n")
    with pytest.raises(ValueError, match="swapped on the way"):
        called("certify", "other/request", "--fingerprint", request)
    assert not (tmp_path / "hospital" / "credential").exists()
    said = called("certify", "hospital/request", "--index", "7", typed="y\n")
    assert "back to 'hospital', index 7" in said
    assert fingerprint in said
    with pytest.raises(ValueError, match="not the one of the credential"):
        called("accept", "other", "hospital/credential", "--authority", fingerprint)
    with pytest.raises(ValueError, match="was expected"):
        called("accept", "hospital", "hospital/credential", typed=f"{request}\n")
    called("accept", "hospital", "hospital/credential", typed=f"{fingerprint}\n")
    identity = Identity.from_bytes((tmp_path / "hospital" / "identity").read_bytes())
    assert (identity.name, identity.index) == ("hospital", 7)
    assert identity.authority.fingerprint == fingerprint
    assert not (tmp_path / "hospital" / "signing.secret").exists()
    with pytest.raises(ValueError, match="is in the register"):
        called("certify", "other/request", "--name", "hospital", typed="y\n")
    with pytest.raises(ValueError, match="is no request"):
        called("certify", "hospital/credential", "--name", "x")


def test_certificates_are_renewed_revoked_and_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fingerprint = called("keys", "keys", "--nodes", "3").split("for every node: ")[1].split()[0]
    request = called("request", "hospital").split()[-1]
    called("certify", "hospital/request", "--fingerprint", request, "--days", "20")
    called("accept", "hospital", "hospital/credential", "--authority", fingerprint)
    assert called("show", "hospital/identity").startswith("identity of 'hospital', index 4\n")
    called("renew", "hospital")
    called("accept", "hospital", "credential", "--authority", fingerprint)
    newer = called("request", "hospital").split()[-1]
    said = called("renew", "hospital", "--request", "hospital/request", "--fingerprint", newer,
                  "--revoke-old")  # fmt: skip
    assert "Send keys/revoked.crl" in said
    called("accept", "hospital", "hospital/credential", "--authority", fingerprint)
    assert newer in called("show", "hospital/identity")
    assert "2 certificates are revoked" in called("heed", "hospital", "keys/revoked.crl")
    assert "unregister" in called("revoke", "node-2")
    assert "List 2: 3 certificates" in called("heed", "keys", "keys/revoked.crl")
    assert called("show", "keys/register.jsonl").count("revoked") == 3
    assert "count until" in called("renew-server")


def test_the_commands_are_a_script(tmp_path):
    make_project(tmp_path / "one two", tmp_path / "my keys", nodes=3, cohort=5, rounds=2, epsilon=1)
    make_keys(tmp_path / "my keys", 3)
    script = called(
        "start", str(tmp_path / "one two"), "--keys", str(tmp_path / "my keys"), "--nodes", "3",
        "--home", str(tmp_path / "flower home"), "--port", "9000",
    )  # fmt: skip
    checked = subprocess.run(["sh", "-n"], input=script, text=True, check=False)
    assert checked.returncode == 0
    assert script.count("fpfl-supernode") == 3
    assert "--enable-supernode-auth" in script
    assert "--ssl-certfile" in script
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    files = [w for w in words if "my keys" in w and "=" not in w]
    assert files
    assert all((tmp_path / "my keys").joinpath(*w.split("my keys/")[1:]).exists() for w in files)
    assert f'identity="{tmp_path}/my keys/node-3/identity" partition-id=2' in words


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_federation, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs cryptography.*fpfl\[flower\]"):
        called("keys", str(tmp_path / "keys"))
    monkeypatch.setitem(federation._HOMES, "Agreement", "flwr.nowhere")
    federation.__dict__.pop("Agreement", None)
    with pytest.raises(ModuleNotFoundError, match=r"fpfl.federation needs flwr.*fpfl\[flower\]"):
        _ = federation.Agreement


def test_what_is_refused(tmp_path):
    make_keys(tmp_path / "keys", 3)
    with pytest.raises(ValueError, match="not empty"):
        called("keys", str(tmp_path / "keys"))
    with pytest.raises(ValueError, match="at least 3"):
        called("keys", str(tmp_path / "few"), "--nodes", "2")
    with pytest.raises(ValueError, match="not empty"):
        called("init", str(tmp_path / "keys"))
    with pytest.raises(ValueError, match="begin it with a letter"):
        called("init", str(tmp_path / "2nd"))
    with pytest.raises(ValueError, match="there is a package 'fpfl' already"):
        called("init", str(tmp_path / "fpfl"))
    with pytest.raises(ValueError, match="at least 3"):
        called("init", str(tmp_path / "small"), "--nodes", "2")
    with pytest.raises(ValueError, match="is not there"):
        called("start", str(tmp_path / "nosuch"), "--keys", str(tmp_path / "keys"), "--nodes", "3")
