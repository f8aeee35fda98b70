"""A job for NVFlare: which classes of this package run with which functions of a project.

No code is in it: the project is a package that is installed at every site, where its people have
read it, and a site's ``class_allow_list`` lets NVFlare make nothing but `fpfl.federation.nvflare`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fpfl.federation.nvflare import TASK
from fpfl.store.files import write_whole

_HERE = "fpfl.federation.nvflare"

ALLOWED = [f"{_HERE}."]
"""What a site's ``class_allow_list`` needs for these jobs."""

FETCH_SECONDS = 0.2
"""Seconds between two questions of a client for a task."""


def write_job(
    folder: Path, name: str, *, agreement: str, load: str, run: str, nodes: int, **server: Any
) -> Path:
    """Write a job into a new folder, for ``nvflare job submit`` or ``nvflare simulator``.

    Parameters
    ----------
    folder
        The new folder.
    name
        The job's name.
    agreement, load
        ``"module:function"`` of the project.
    run
        Where the server writes the run down: a path in its workspace, or one from the root.
    nodes
        The fewest clients that the job begins with.
    **server
        More for `fpfl.federation.nvflare.controller.FederationController`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty; name another folder")
    meta = {
        "name": name,
        "resource_spec": {},
        "min_clients": nodes,
        "deploy_map": {"app": ["@ALL"]},
    }
    given = {"agreement": agreement, "folder": run, **server}
    controller = {"id": "fpfl", "path": f"{_HERE}.controller.FederationController", "args": given}
    executor = {
        "path": f"{_HERE}.executor.FederationExecutor",
        "args": {"agreement": agreement, "load": load},
    }
    written = {
        "meta.json": meta,
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "server": {"task_request_interval": FETCH_SECONDS},
            "workflows": [controller],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": [TASK], "executor": executor}],
        },
    }
    for path, content in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / path, (json.dumps(content, indent=2) + "\n").encode())
    return folder
