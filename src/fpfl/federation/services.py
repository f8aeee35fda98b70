"""What starts a federation's parts, and starts them again: units of systemd, files of Docker.

A node gets its own folder and what its loader reads, and the network as far as the server. Every
part is started again whenever it ends, and goes on where it was: a node by its key, the SuperLink
by its database.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fpfl.federation.enrolment import IDENTITY, ROOT, SERVER, SERVER_KEY, SUPERNODE
from fpfl.federation.quoting import address, joined, plain, printable

USER = "fpfl"
ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
AGAIN = 5
"""Seconds until a part that ended is started again."""


def node_config(identity: Path | str, more: Mapping[str, bool | int | float | str]) -> str:
    """What a node is told (``--node-config``), as Flower reads it: ``name="text" number=1``."""
    given: dict[str, bool | int | float | str] = {"identity": str(identity), **more}
    pairs = []
    for name, value in given.items():
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} is no name; expected letters, digits, - and _")
        if isinstance(value, str) and not {'"', "\\"}.isdisjoint(printable(value)):
            raise ValueError(
                f"{name}={value!r}: a quote or a backslash means something to Flower; rename it"
            )
        pairs.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    return " ".join(pairs)


def read_config(pairs: Sequence[str]) -> dict[str, bool | int | float | str]:
    """``name=value`` pairs; a value that is a number, true or false is taken as such."""
    found: dict[str, bool | int | float | str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} is no setting of a node; expected NAME=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name] = value if isinstance(value, bool | int | float | str) else text
    return found


def supernode(superlink: str, keys: str, root: str, config: str, *, port: int) -> list[str]:
    """The command that starts a node: Flower's, with a warm process for its messages."""
    return [
        "fpfl-supernode",
        "--superlink",
        joined(*address(superlink)),
        "--port",
        str(port),
        "--root-certificates",
        root,
        "--auth-supernode-private-key",
        f"{keys}/{SUPERNODE}",
        "--node-config",
        config,
    ]


def superlink(keys: str, database: str, *, port: int) -> list[str]:
    """The command that starts the SuperLink, which listens to its own machine alone."""
    return [
        "flower-superlink",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        database,
        "--ssl-ca-certfile",
        f"{keys}/{ROOT}",
        "--ssl-certfile",
        f"{keys}/{SERVER}",
        "--ssl-keyfile",
        f"{keys}/{SERVER_KEY}",
    ]


# --- systemd ------------------------------------------------------------------------------------


def node_unit(
    server: str,
    keys: Path,
    programs: Path,
    *,
    config: Mapping[str, bool | int | float | str],
    data: Sequence[Path] = (),
    port: int = 9094,
) -> str:
    """A unit for a node.

    Parameters
    ----------
    server
        The proxy's address, ``HOST:PORT``. With an address in place of a name, nothing else but
        it and the machine itself can be reached.
    keys
        The node's own folder, with ``ca.pem`` in it or beside it.
    programs
        Where ``fpfl-supernode`` is.
    config
        What the node's loader is told.
    data
        What the loader reads. Nothing else of /home and /root is there for it.
    port
        Flower's own, on this machine.
    """
    name, _ = address(server)
    try:
        reach = f"IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow={_ip(name)}\n"
    except ValueError:
        reach = "# With an address in place of the server's name, it alone can be reached.\n"
    told = node_config(plain(keys / IDENTITY), {n: _told(v) for n, v in config.items()})
    command = supernode(server, plain(keys), plain(keys / ROOT), told, port=port)
    return _unit("a node of a federation", command, keys, programs, data, reach)


def superlink_unit(keys: Path, programs: Path, *, runs: Path, port: int = 8000) -> str:
    """A unit for the SuperLink; ``runs`` is where runs are written down."""
    database = f"/var/lib/{USER}/superlink.db"
    reach = "IPAddressDeny=any\nIPAddressAllow=localhost\n"
    command = superlink(plain(keys), database, port=port)
    return _unit("the SuperLink of a federation", command, keys, programs, (), reach, writes=runs)


def proxy_unit(keys: Path, configuration: Path, programs: Path = Path("/usr/sbin")) -> str:
    """A unit for the proxy; ``configuration`` is what `fpfl.federation.proxy` wrote."""
    command = ["nginx", "-p", f"/var/lib/{USER}", "-c", plain(configuration), "-g", "daemon off;"]
    return _unit("the proxy of a federation", command, keys, programs, (configuration,), "")


def _told(value: bool | int | float | str) -> bool | int | float | str:
    return plain(value) if isinstance(value, str) else value


def _ip(name: str) -> str:
    return str(ipaddress.ip_address(name))


def _unit(
    what: str,
    command: list[str],
    keys: Path,
    programs: Path,
    data: Sequence[Path],
    reach: str,
    writes: Path | None = None,
) -> str:
    words = [f"{plain(programs)}/{command[0]}", *command[1:]]
    quoted = " ".join(_systemd(word) for word in words)
    # A node writes beside its identity; what a unit sees of /home is what is named here.
    lines = [f"ReadWritePaths={plain(path)}" for path in (keys, writes) if path is not None]
    python = Path(sys.base_prefix)
    own = (programs.parent, *(() if python.is_relative_to("/usr") else (python,)))
    lines += [f"BindReadOnlyPaths={plain(path)}" for path in (*own, *data)]
    lines += [f"BindPaths={plain(path)}" for path in (keys, writes) if path is not None]
    environment = "\n".join(f"Environment={n}={v}" for n, v in ENVIRONMENT.items())
    return _UNIT.format(
        what=what,
        user=USER,
        environment=environment,
        path=plain(programs),
        command=quoted,
        again=AGAIN,
        paths="\n".join(lines),
        reach=reach,
    )


def _systemd(word: str) -> str:
    """A word of a command: % and $ mean something, and so do quotes and backslashes."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'


_UNIT = """\
[Unit]
Description=fpfl: {what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=always
RestartSec={again}
User={user}
Group={user}
UMask=0077
StateDirectory={user}
StateDirectoryMode=0700
WorkingDirectory=/var/lib/{user}
Environment=FLWR_HOME=/var/lib/{user}/flower HOME=/var/lib/{user}
Environment=PATH={path}:/usr/bin:/bin
{environment}

# Nothing of this machine but what is named here.
ProtectSystem=strict
ProtectHome=tmpfs
{paths}
PrivateTmp=yes
PrivateDevices=yes
ProtectProc=invisible
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
{reach}
[Install]
WantedBy=multi-user.target
"""


# --- containers ---------------------------------------------------------------------------------

CONTAINERFILE = """\
# docker build -t fpfl-node . : Flower and fpfl, and a user of their own.
FROM python:3.11-slim
RUN pip install --no-cache-dir 'fpfl[flower]' \\
 && useradd --uid 10001 --create-home --home-dir /var/lib/fpfl fpfl
USER fpfl
WORKDIR /var/lib/fpfl
ENV FLWR_HOME=/var/lib/fpfl/flower
"""


def node_compose(
    server: str,
    keys: Path,
    *,
    config: Mapping[str, bool | int | float | str],
    data: Sequence[Path] = (),
    image: str = "fpfl-node",
) -> str:
    """A compose file for a node: its network is its own, so nobody on the machine asks it anything.

    Parameters
    ----------
    server, keys, config
        See `node_unit`.
    data
        What the loader reads, under the same path and for reading alone.
    image
        Made from `CONTAINERFILE`.
    """
    inside = "/run/fpfl/keys"
    told = node_config(f"{inside}/{IDENTITY}", {n: _told(v) for n, v in config.items()})
    command = supernode(server, inside, f"{inside}/{ROOT}", told, port=9094)
    volumes = [f"{plain(keys)}:{inside}"]
    volumes += [f"{plain(path)}:{plain(path)}:ro" for path in data]
    return _COMPOSE.format(
        image=json.dumps(plain(image)),
        # A dollar sign is a variable to compose; two of them are one.
        command=json.dumps([word.replace("$", "$$") for word in command]),
        volumes=json.dumps(volumes),
        environment=json.dumps(ENVIRONMENT),
    )


_COMPOSE = """\
# docker compose up -d. The keys' folder belongs to user 10001.
services:
  node:
    image: {image}
    command: {command}
    environment: {environment}
    volumes: {volumes}
    restart: always
    read_only: true
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    tmpfs: ["/tmp", "/var/lib/fpfl:uid=10001,mode=0700"]
    pids_limit: 256
"""
