"""What a site's people put into its NVFlare workspace, beside what NVFlare's provisioning made.

NVFlare's defaults let a project's administrator send code along with a job and read files at the
sites, and send each job's error log to the server. Here none of it is allowed, and a job can make
nothing but `fpfl.federation.nvflare`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fpfl.federation.enrolment import AUTHORITY, IDENTITY
from fpfl.federation.nvflare import PLACE
from fpfl.federation.nvflare.job import ALLOWED
from fpfl.store.files import write_whole

_CLOSED = ("byoc", "shell_commands")
"""Rights that nobody needs: to bring code, and to look at a site's files."""

_RESOURCES, _RIGHTS = "resources.json", "authorization.json"


def prepare_site(
    workspace: Path, identity: Path, name: str, told: Mapping[str, str | int | float | bool]
) -> Path:
    """Tell a client who it is, and close what its federation does not need; the node's folder.

    Parameters
    ----------
    workspace
        The client's, as ``nvflare provision`` made it.
    identity
        The file that the authority made for this node.
    name
        The client's name in NVFlare.
    told
        What the project's loader gets.
    """
    restrict(workspace)
    place = workspace / PLACE / name
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(place / IDENTITY, identity.read_bytes(), mode=0o600)
    lines = [f"{_toml(key)} = {_toml(value)}\n" for key, value in told.items()]
    write_whole(place / "node.toml", "".join(lines).encode())
    return place


def prepare_server(workspace: Path, authority: Path) -> Path:
    """Tell the server whose nodes count, and close what its federation does not need.

    Parameters
    ----------
    workspace
        The server's, as ``nvflare provision`` made it.
    authority
        The file with the authority's certificate.
    """
    restrict(workspace)
    place = workspace / PLACE
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(authority, place / AUTHORITY)
    return place


def restrict(workspace: Path) -> None:
    """Let no job bring code, make other classes, or have a site's logs sent away, nor read files.

    NVFlare reads a site's own files in place of its defaults, which stay as they are.
    """
    local = workspace / "local"
    rules = _read(local, _RESOURCES)
    rules |= {"class_allow_list": ALLOWED, "class_list_enforcement_mode": "enforce"}
    rules["allow_log_streaming"] = False
    _write(local, _RESOURCES, rules)
    rights = _read(local, _RIGHTS)
    roles = rights["permissions"]
    named = {right for each in roles.values() if isinstance(each, dict) for right in each}
    for role, given in roles.items():
        # One word stands for every right.
        each = dict.fromkeys(sorted(named), given) if isinstance(given, str) else dict(given)
        roles[role] = each | dict.fromkeys(_CLOSED, "none")
    _write(local, _RIGHTS, rights)


def _toml(value: str | int | float | bool) -> str:
    """JSON's strings, numbers and truth values are TOML's."""
    return json.dumps(value, ensure_ascii=False)


def _read(local: Path, name: str) -> dict[str, Any]:
    own, default = local / name, local / f"{name}.default"
    path = own if own.is_file() else default
    if not path.is_file():
        raise ValueError(
            f"{default} is not there: name the workspace of one site, a folder with startup/ and "
            "local/ that nvflare provision or nvflare poc prepare made"
        )
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(local: Path, name: str, content: Mapping[str, Any]) -> None:
    write_whole(local / name, (json.dumps(content, indent=2) + "\n").encode())
