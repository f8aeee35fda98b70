"""The commands about federations: a project, its keys, enrolling, starting and watching."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fpfl.cli.options import help_alone

app = typer.Typer(help="Make and start a federation over a network.")

Keys = Annotated[Path, typer.Option(help="The folder with the federation's keys.")]
Connection = Annotated[str, typer.Argument(help="The SuperLink's name in Flower's configuration.")]
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
    from fpfl.federation.deployment import commands

    places = (project.resolve(), keys.resolve(), home.resolve())
    print(commands(*places, nodes=nodes, port=port))


@app.command()
def run(
    project: str,
    connection: Connection = "here",
    run_config: Annotated[
        str | None, typer.Option(help="Settings in place of the project's own.")
    ] = None,
) -> None:
    """Start a run and wait for it: flwr run --stream, with a status that says how it ended.

    PROJECT is the folder that fpfl federation init wrote. A run that has begun goes on.
    """
    from fpfl.federation.deployment import COMPLETED
    from fpfl.federation.deployment import run as carried_out

    # What it has started ends with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        ended = carried_out(project, connection, run_config)
    finally:
        signal.signal(signal.SIGTERM, before)
    if ended != COMPLETED:
        print(f"The run was not completed: {ended}. Started again, it goes on.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def status(
    folder: Annotated[Path | None, typer.Argument(help="A run's folder.")] = None,
    connection: Annotated[
        str | None, typer.Option(help="The SuperLink's name in Flower's configuration.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="The folder that fpfl federation start was given.")
    ] = None,
) -> None:
    """Say what is known: nodes, the run's round, ε spent, who was left out, the last lines.

    With FOLDER what the run's folder says, which needs no network. With --connection or --home
    what the SuperLink says.
    """
    from fpfl.federation.deployment import CONFIG, CONNECTION
    from fpfl.federation.status import of_folder, of_link

    if folder is None and connection is None and home is None:
        raise ValueError("nothing to look at: name a run's folder, --connection NAME or --home DIR")
    if folder is not None:
        print(of_folder(folder))
    if home is not None:
        if not (home / CONFIG).is_file():
            raise ValueError(f"{home / CONFIG} is not there: fpfl federation start writes it")
        os.environ["FLWR_HOME"] = str(home.resolve())
    if connection is not None or home is not None:
        print(of_link(connection or CONNECTION))


@app.command()
def proxy(
    name: Annotated[str, typer.Option(help="What nodes call the server by.")],
    keys: Keys = Path("keys"),
    listen: Annotated[str, typer.Option(help="Where nodes come in.")] = "0.0.0.0:8443",
    superlink: Annotated[
        str, typer.Option(help="Where the SuperLink listens: this machine.")
    ] = "127.0.0.1:8000",
    megabytes: Annotated[int, typer.Option(help="The largest message's size.")] = 64,
    connections: Annotated[int, typer.Option(help="Most at once from one address.")] = 64,
) -> None:
    """Print a configuration of nginx that passes on the nodes' own calls, and nothing else."""
    from fpfl.federation.project import ROOT, SERVER, SERVER_KEY
    from fpfl.federation.proxy import nginx

    place = keys.resolve()
    print(
        nginx(
            place / ROOT, place / SERVER, place / SERVER_KEY,
            name=name, listen=listen, superlink=superlink,
            megabytes=megabytes, connections=connections,
        ),
        end="",
    )  # fmt: skip


@app.command()
def service(
    part: Annotated[str, typer.Argument(help="node, superlink or image.")],
    keys: Annotated[Path, typer.Option(help="The part's own keys, with ca.pem among them.")],
    superlink: Annotated[
        str | None, typer.Option(help="A node's: where the proxy is, HOST:PORT.")
    ] = None,
    compose: Annotated[bool, typer.Option("--compose/--systemd", help="For which.")] = False,
    config: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for a node's loader; again for more.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="What a node's loader reads; again for more.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the server writes runs.")] = Path("runs"),
    port: Annotated[int | None, typer.Option(help="Flower's own port on this machine.")] = None,
) -> None:
    """Print a unit of systemd, or a compose file, that starts a part and starts it again.

    PART is node, superlink, or image, which is the Containerfile of a node's image.
    """
    from fpfl.federation import services

    place, programs = keys.resolve(), Path(sys.executable).parent
    told = services.read_config(config or [])
    paths = [path.resolve() for path in data or []]
    if part == "image":
        made = services.CONTAINERFILE
    elif part == "superlink" and not compose:
        made = services.superlink_unit(place, programs, runs=runs.resolve(), port=port or 8000)
    elif part == "node" and superlink is None:
        raise ValueError("a node has to know where to go: --superlink HOST:PORT")
    elif part == "node" and superlink is not None and compose:
        made = services.node_compose(superlink, place, config=told, data=paths)
    elif part == "node" and superlink is not None:
        made = services.node_unit(
            superlink, place, programs, config=told, data=paths, port=port or 9094
        )
    else:
        raise ValueError(
            f"there is no {'compose file' if compose else 'unit'} for {part!r}; expected node, "
            "superlink (with systemd) or image"
        )
    print(made, end="")
