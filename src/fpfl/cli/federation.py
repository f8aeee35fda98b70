"""The commands about federations: ``fpfl federation init``, ``keys``, ``start``, and enrolling."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fpfl.cli.options import help_alone

app = typer.Typer(help="Make and start a federation over a network.")

Keys = Annotated[Path, typer.Option(help="The folder with the federation's keys.")]
Nodes = Annotated[int, typer.Option(help="How many nodes are enrolled.")]


@app.callback(invoke_without_command=True)
def _needs(ctx: typer.Context) -> None:
    """Make and start a federation over a network."""
    help_alone(ctx)
    for name in ("cryptography", "flwr"):
        if find_spec(name) is None:
            raise ImportError(
                f"a federation needs {name}, which is not installed: pip install 'fpfl[flower]'"
            )


@app.command()
def init(
    folder: Path,
    keys: Keys = Path("keys"),
    nodes: Nodes = 5,
    cohort: Annotated[int, typer.Option(help="Users in a round, on average.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    epsilon: Annotated[float, typer.Option(help="ε of all rounds together.")] = 2.0,
) -> None:
    """Write a Flower project that trains a fair and private model; its task is Adult.

    FOLDER is the new project.
    """
    from fpfl.federation.project import make_project

    made = make_project(folder, keys, nodes=nodes, cohort=cohort, rounds=rounds, epsilon=epsilon)
    for path in made:
        print(path)
    print(f"Next: fpfl federation keys {keys} --nodes {nodes}, and put your own task into task.py.")


@app.command()
def keys(
    folder: Path,
    nodes: Nodes = 5,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address that the server is reached by.")
    ] = None,
) -> None:
    """Make all keys: TLS, Flower's node authentication, identities for secure aggregation.

    FOLDER is a new one, for the keys.
    """
    from fpfl.federation.project import make_keys

    make_keys(folder, nodes, tuple(host or ("127.0.0.1", "localhost")))
    print(f"The keys of {nodes} nodes are in {folder}: give each node its own folder and ca.pem.")
    print(f"Keep {folder / 'authority.secret'} off the network: it enrols nodes.")


@app.command()
def request(folder: Path) -> None:
    """On a node: make its own keys in a new FOLDER, and a request for the authority."""
    from fpfl.federation.project import SUPERNODE, make_request

    print(f"Send {make_request(folder)} to the authority, and to whoever runs the SuperLink")
    print(f"{folder / SUPERNODE}.pub; the rest stays here.")


@app.command()
def certify(
    request: Path,
    name: Annotated[str, typer.Option(help="The node's name; each only once.")],
    index: Annotated[int, typer.Option(help="Its index, from 1; each only once.")],
    keys: Keys = Path("keys"),
) -> None:
    """On the authority's machine: sign the REQUEST that a node sent."""
    from fpfl.federation.project import certify as signed

    print(f"Send {signed(keys, request, name, index)} back to {name}.")


@app.command()
def accept(folder: Path, credential: Path) -> None:
    """On a node: join the key in its FOLDER and the CREDENTIAL that the authority sent back."""
    from fpfl.federation.project import IDENTITY
    from fpfl.federation.project import accept as accepted

    print(f"{folder / IDENTITY} is the identity of {accepted(folder, credential).name}.")


@app.command()
def start(
    project: Path,
    keys: Keys = Path("keys"),
    nodes: Nodes = 5,
    port: Annotated[int, typer.Option(help="The SuperLink's port; nodes take those after.")] = 8000,
    home: Annotated[Path, typer.Option(help="For logs and Flower's own files.")] = Path("flower"),
) -> None:
    """Print the commands that start a whole federation on this machine: ... | sh -s.

    PROJECT is the folder that fpfl federation init wrote.
    """
    from fpfl.federation.project import commands

    places = (project.resolve(), keys.resolve(), home.resolve())
    print(commands(*places, nodes=nodes, port=port))
