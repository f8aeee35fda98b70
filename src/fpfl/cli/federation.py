"""The commands about federations: ``fpfl federation init``, ``keys``, ``start``, and enrolling."""

from __future__ import annotations

import json
from contextlib import closing
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
def approve(
    site: Path,
    fingerprint: str,
    yes: Annotated[bool, typer.Option(help="Approve without being asked.")] = False,
    again: Annotated[
        bool, typer.Option(help="Allow all rounds once more of one that is approved.")
    ] = False,
) -> None:
    """On a node: show an agreement that a server asked under, and approve it.

    SITE is the folder of the node's identity; FINGERPRINT is what the node's log says.
    """
    from fpfl.federation.approval import in_words
    from fpfl.federation.ledger import NotAnsweredError
    from fpfl.federation.site import SiteNode

    with closing(SiteNode.at(site)) as node:
        assert node.ledger is not None
        known = node.ledger.accounts.get(fingerprint)
        if known is not None:
            print(in_words(fingerprint, known.terms))
        if known is not None and known.approved and not again:
            print("It is approved already; --again allows all its rounds once more.")
            return
        if known is not None and not yes:
            typer.confirm("Approve it?", abort=True)
        try:
            node.approve(fingerprint, "a person", again=again)
        except NotAnsweredError as error:
            raise ValueError(f"{error} {error.here}".strip()) from None
        print(f"Approved: {node.identity.name} answers its rounds from now on.")


@app.command()
def end(site: Path, fingerprint: str) -> None:
    """On a node: answer nothing more under an agreement, for good; what it did not use is free."""
    from fpfl.federation.ledger import NotAnsweredError
    from fpfl.federation.site import SiteNode

    with closing(SiteNode.at(site)) as node:
        assert node.ledger is not None
        try:
            node.ledger.end(fingerprint)
        except NotAnsweredError as error:
            raise ValueError(str(error)) from None
    print(f"{fingerprint} is over: {site} answers nothing more under it.")


@app.command()
def pause(site: Path) -> None:
    """On a node: refuse everything, from the next message on."""
    from fpfl.federation.site import pause as paused

    paused(site)
    print(f"Paused. fpfl federation resume {site} goes on.")


@app.command()
def resume(site: Path) -> None:
    """On a node: answer again after a pause."""
    from fpfl.federation.site import resume as resumed

    resumed(site)
    print("Not paused: the node answers what its site allows.")


@app.command()
def ledger(
    site: Path,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """On a node: verify its ledger, and say what it has agreed to and answered.

    SITE is the folder of the node's identity.
    """
    from fpfl.federation.site import figures, figures_in_words

    found = figures(site)
    print(json.dumps(found, indent=2) if as_json else figures_in_words(found))


@app.command()
def pin(package: str) -> None:
    """On a node: print the lines of site.toml that pin an installed PACKAGE as it is now."""
    from fpfl.federation.site import package_folder, package_hash

    print(f'[package]\nname = "{package}"\nsha256 = "{package_hash(package_folder(package))}"')


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
