"""The commands for NVFlare: ``fpfl federation nvflare job``, ``site`` and ``server``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from fpfl.cli.options import help_alone

app = typer.Typer(help="Run a federation's project under NVFlare.")


@app.callback(invoke_without_command=True)
def _alone(ctx: typer.Context) -> None:
    """Run a federation's project under NVFlare."""
    help_alone(ctx)


@app.command()
def job(
    project: Path,
    folder: Path,
    run: Annotated[
        str, typer.Option(help="Where the server writes: in its workspace, or from the root.")
    ] = "fpfl-run",
    nodes: Annotated[int, typer.Option(help="The fewest clients to begin with.")] = 5,
) -> None:
    """Write a job for NVFlare into a new FOLDER; no code is in it.

    PROJECT is the folder that fpfl federation init wrote. Install it at every site.
    """
    from fpfl.federation.nvflare.job import write_job

    found = sorted(project.glob("*/task.py"))
    if len(found) != 1:
        raise ValueError(
            f"{project} has {len(found)} packages with a task.py; name the folder that fpfl "
            "federation init wrote"
        )
    task = f"{found[0].parent.name}.task"
    write_job(
        folder,
        found[0].parent.name,
        agreement=f"{task}:agreement",
        load=f"{task}:load",
        run=run,
        nodes=nodes,
    )
    print(f"{folder}: nvflare job submit -j {folder}, when {project} is installed at every site.")


@app.command()
def site(
    workspace: Path,
    name: Annotated[str, typer.Option(help="The client's name in NVFlare.")],
    identity: Annotated[Path, typer.Option(help="The node's identity file.")],
    tell: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the project's loader; a TOML value.")
    ] = None,
) -> None:
    """At a site: tell NVFlare's client who it is, and take no code from jobs.

    WORKSPACE is what nvflare provision made for it.
    """
    from fpfl.federation.nvflare.site import prepare_site

    place = prepare_site(workspace, identity, name, tomllib.loads("\n".join(tell or [])))
    print(f"{place} has the node's identity; its log will be there, too. Restart the client.")


@app.command()
def server(
    workspace: Path,
    authority: Annotated[Path, typer.Option(help="The file with the authority's certificate.")],
) -> None:
    """On the server: say whose nodes count, and take no code from jobs.

    WORKSPACE is what nvflare provision made for it.
    """
    from fpfl.federation.nvflare.site import prepare_server

    place = prepare_server(workspace, authority)
    print(f"{place} has the authority's certificate. Restart the server.")
