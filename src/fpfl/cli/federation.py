"""The commands about federations: a project, its keys and who has them, starting and watching."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fpfl.cli import nvflare
from fpfl.cli.options import help_alone

app = typer.Typer(help="Make and start a federation over a network.")
app.add_typer(nvflare.app, name="nvflare")

Keys = Annotated[Path, typer.Option(help="The folder with the federation's keys.")]
Connection = Annotated[str, typer.Argument(help="The SuperLink's name in Flower's configuration.")]
Nodes = Annotated[int, typer.Option(help="How many nodes are enrolled.")]
Days = Annotated[int, typer.Option(help="How long certificates count.")]
Fingerprint = Annotated[
    str | None,
    typer.Option(help="The request's, as the node says it; without it you are asked."),
]


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
    nodes: Annotated[
        int, typer.Option(help="How many nodes are enrolled; 0 where each makes its own keys.")
    ] = 5,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address that the server is reached by.")
    ] = None,
    days: Days = 365,
) -> None:
    """Make all keys: TLS, Flower's node authentication, identities for secure aggregation.

    FOLDER is a new one, for the keys.
    """
    from fpfl.federation.enrolment import REGISTER, ROOT_KEY, SECRET, make_keys

    trust = make_keys(folder, nodes, tuple(host or ("127.0.0.1", "localhost")), days=days)
    if nodes:
        print(f"The keys of {nodes} nodes are in {folder}: give each its own folder and ca.pem.")
    print(f"The authority's fingerprint, for every node: {trust.fingerprint}")
    print(f"Keep {folder / SECRET}, {ROOT_KEY} and {REGISTER} off the network:")
    print("they enrol nodes, revoke them, and renew the server's certificate.")


@app.command()
def request(
    folder: Path,
    name: Annotated[
        str | None, typer.Option(help="The node's name; by default the folder's.")
    ] = None,
) -> None:
    """On a node: make its own keys in a new FOLDER, and a request for the authority.

    Where FOLDER has an identity, the request is for a new key under the same name.
    """
    from fpfl.federation.enrolment import SUPERNODE, make_request, read_request

    renewal = folder.exists()
    made = make_request(folder, name)
    asked = read_request(made)
    print(f"Send {made} to the authority. The rest stays here.")
    if not renewal:
        print(f"Whoever runs the SuperLink registers {folder / SUPERNODE}.pub.")
    print(f"Fingerprint of the request of {asked.name!r}, for a call to the authority:")
    print(asked.fingerprint)


@app.command()
def certify(
    request: Path,
    name: Annotated[
        str | None, typer.Option(help="The node's name; by default the request's.")
    ] = None,
    index: Annotated[
        int | None, typer.Option(help="Its index, from 1; by default the next one.")
    ] = None,
    keys: Keys = Path("keys"),
    fingerprint: Fingerprint = None,
    days: Days = 365,
) -> None:
    """On the authority's machine: sign the REQUEST that a new node sent."""
    from fpfl.federation.enrolment import CREDENTIAL
    from fpfl.federation.enrolment import certify as certified

    given = _compared(request, fingerprint)
    made = certified(keys, request, given, name, index, days=days)
    print(f"Send {request.with_name(CREDENTIAL)} back to {made.name!r}, index {made.index}.")
    _until(made.ends, keys)


@app.command()
def accept(
    folder: Path,
    credential: Path,
    authority: Annotated[
        str | None,
        typer.Option(help="The authority's fingerprint, as it says it; without it you are asked."),
    ] = None,
) -> None:
    """On a node: join the key in its FOLDER and the CREDENTIAL that the authority sent back."""
    from fpfl.federation.enrolment import IDENTITY
    from fpfl.federation.enrolment import accept as accepted

    if authority is None:
        authority = typer.prompt("The authority's fingerprint, from the authority itself")
    made = accepted(folder, credential, str(authority))
    print(f"{folder / IDENTITY} is the identity of {made.name!r}, index {made.index}.")
    print(f"It counts until {made.credential.ends:%Y-%m-%d}.")


@app.command()
def renew(
    name: str,
    keys: Keys = Path("keys"),
    request: Annotated[
        Path | None, typer.Option(help="The node's request, for a new key; else the same key.")
    ] = None,
    fingerprint: Fingerprint = None,
    revoke_old: Annotated[
        bool, typer.Option("--revoke-old", help="Earlier certificates count no longer.")
    ] = False,
    days: Days = 365,
    out: Annotated[
        Path | None,
        typer.Option(help="For the credential; by default beside the request, or here."),
    ] = None,
) -> None:
    """On the authority's machine: a new certificate for the node NAME, with the same index."""
    from fpfl.federation.enrolment import CREDENTIAL, REVOKED
    from fpfl.federation.enrolment import renew as renewed

    given = None if request is None else _compared(request, fingerprint)
    where = out or (Path(CREDENTIAL) if request is None else request.with_name(CREDENTIAL))
    made = renewed(keys, name, where, request, given, revoke_old=revoke_old, days=days)
    print(f"Send {where} to {name!r}, which accepts it.")
    if revoke_old:
        print(f"Send {keys / REVOKED} to the server and every node, once {name!r} has.")
    _until(made.ends, keys)


@app.command()
def revoke(
    names: Annotated[
        list[str] | None, typer.Argument(help="Nodes; with none the list is signed anew.")
    ] = None,
    keys: Keys = Path("keys"),
    days: Annotated[int, typer.Option(help="How long the list can be relied on.")] = 90,
) -> None:
    """On the authority's machine: revoke all certificates of nodes, and sign the list."""
    from fpfl.federation.enrolment import revoke as revoked

    path = revoked(keys, tuple(names or ()), days=days)
    print(f"Send {path} to the server and every node: fpfl federation heed FOLDER {path.name}")
    print(f"Until it is there, they do not know. Within {days} days they need the next one.")
    if names:
        print("With Flower: flwr supernode list, and flwr supernode unregister.")


@app.command()
def heed(folder: Path, revoked: Path) -> None:
    """On a node or the server: put the list REVOKED into the FOLDER with its identity or key."""
    from fpfl.federation.enrolment import accept_list

    found = accept_list(folder, revoked)
    print(f"List {found.number}: {len(found.serials)} certificates are revoked.")
    print(f"It can be relied on until {found.ends:%Y-%m-%d}.")


@app.command("renew-server")
def renew_server(
    keys: Keys = Path("keys"),
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address; by default those of before.")
    ] = None,
) -> None:
    """Where ca.secret is: a new TLS certificate for the server. Nodes keep their ca.pem."""
    from fpfl.federation.enrolment import SERVER, SERVER_KEY
    from fpfl.federation.enrolment import renew_server as renewed

    ends = renewed(keys, tuple(host or ()))
    print(f"Give the server {keys / SERVER} and {SERVER_KEY}; they count until {ends:%Y-%m-%d}.")


@app.command()
def show(file: Path) -> None:
    """Say what is in FILE: a request, credential, identity, list, register or authority.key."""
    from fpfl.federation.inspection import described

    print("\n".join(described(file)))


def _compared(request: Path, fingerprint: str | None) -> str:
    """The fingerprint that the node said, or the request's once somebody has compared the two."""
    from fpfl.federation.enrolment import read_request

    asked = read_request(request)
    print(f"{request} is by {asked.name!r}, with the fingerprint")
    print(asked.fingerprint)
    if fingerprint is None:
        typer.confirm("Does the node say the same, by telephone or in person?", abort=True)
        return asked.fingerprint
    return fingerprint


def _until(ends: datetime, keys: Path) -> None:
    from fpfl.federation.enrolment import AUTHORITY, load_trust

    print(f"It counts until {ends:%Y-%m-%d}. The authority's fingerprint, which the node is asked:")
    print(load_trust(keys / AUTHORITY).fingerprint)


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
    from fpfl.federation.status import of_link
    from fpfl.report.standing import standing

    if folder is None and connection is None and home is None:
        raise ValueError("nothing to look at: name a run's folder, --connection NAME or --home DIR")
    if folder is not None:
        print(standing(folder))
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
    from fpfl.federation.enrolment import ROOT, SERVER, SERVER_KEY
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
    part: Annotated[str, typer.Argument(help="node, superlink, proxy or image.")],
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

    PART is node, superlink, proxy (of the keys' nginx.conf, which fpfl federation proxy wrote), or
    image, which is the Containerfile of a node's image.
    """
    from fpfl.federation import services

    place, programs = keys.resolve(), Path(sys.executable).parent
    told = services.read_config(config or [])
    paths = [path.resolve() for path in data or []]
    if part == "image":
        made = services.CONTAINERFILE
    elif part == "superlink" and not compose:
        made = services.superlink_unit(place, programs, runs=runs.resolve(), port=port or 8000)
    elif part == "proxy" and not compose:
        made = services.proxy_unit(place, place / "nginx.conf")
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
            "superlink or proxy (with systemd), or image"
        )
    print(made, end="")
