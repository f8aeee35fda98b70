"""The proxy in front of the SuperLink: the nodes' own calls pass, and nothing else does.

Flower 1.41 serves nodes (``/v1/fleet/``), operators (``/v1/control/``) and its own processes
(``/v1/runtime/``) on one port, and asks of operators and processes no more than a TLS connection.
So the SuperLink listens to its own machine alone, and the port that nodes reach is this one.

A call that passes is named in full, and the SuperLink gets that name, not what the caller wrote:
there is no way of spelling another one (``..``, ``%2e``, ``//``).
"""

from __future__ import annotations

from pathlib import Path

from fpfl.federation.quoting import address, host, joined, plain

CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "pull-object",
    "push-object",
    "confirm-message-received",
)
"""What a SuperNode with a key asks. ``register-node`` and ``unregister-node`` are for those without
one: it is operators who register a key."""

CONNECTIONS = 64
"""Connections from one address: a node has two, or a handful; several may share an address."""

MEGABYTES = 64
"""The largest body. A node's vector is one, with 4 bytes for every number."""


def nginx(
    root: Path,
    certificate: Path,
    key: Path,
    *,
    name: str,
    listen: str = "0.0.0.0:8443",
    superlink: str = "127.0.0.1:8000",
    megabytes: int = MEGABYTES,
    connections: int = CONNECTIONS,
) -> str:
    """The whole configuration file of an nginx that passes on the nodes' calls alone.

    Parameters
    ----------
    root
        The certificate that the SuperLink's is signed by.
    certificate, key
        What the proxy shows to nodes. `fpfl federation keys` makes one for both.
    name
        What nodes call the server by, and its certificate's name.
    listen
        Where nodes come in.
    superlink
        Where the SuperLink listens: on this machine alone.
    megabytes
        Larger bodies are refused.
    connections
        More at once from one address are refused.
    """
    if min(megabytes, connections) < 1:
        raise ValueError(
            f"{megabytes} megabytes and {connections} connections: both must be 1 or more"
        )
    if not host(address(superlink)[0]).startswith(("127.", "::1", "localhost")):
        raise ValueError(
            f"the SuperLink's address is {superlink}; expected one of this machine alone, as in "
            "127.0.0.1:8000: who reaches it without the proxy can do all that an operator can"
        )
    files = [plain(path) for path in (root, certificate, key)]
    calls = "\n".join(
        f"    location = /v1/fleet/{call} {{ proxy_pass https://superlink/v1/fleet/{call}; }}"
        for call in CALLS
    )
    return _NGINX.format(
        root=files[0],
        certificate=files[1],
        key=files[2],
        name=host(name),
        listen=joined(*address(listen)),
        superlink=joined(*address(superlink)),
        megabytes=megabytes,
        connections=connections,
        calls=calls,
    )


_NGINX = """\
# In front of a Flower SuperLink: the nodes' own calls pass, and nothing else does.
# nginx -p FOLDER -c FILE starts it, with a folder for its own files; -t only checks it.
worker_processes auto;
error_log stderr warn;
pid nginx.pid;
events {{ worker_connections 4096; }}

http {{
  access_log off;
  server_tokens off;
  limit_conn_zone $binary_remote_addr zone=address:10m;
  # What is stored meanwhile is sealed for the nodes, or sent to all of them.
  client_body_temp_path nginx-body;
  proxy_temp_path nginx-proxy;
  fastcgi_temp_path nginx-fastcgi;
  uwsgi_temp_path nginx-uwsgi;
  scgi_temp_path nginx-scgi;

  upstream superlink {{
    server {superlink};
    keepalive 32;
  }}

  server {{
    listen {listen} ssl;
    server_name {name};
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;

    # The SuperLink's own certificate is checked, too.
    proxy_ssl_verify on;
    proxy_ssl_trusted_certificate {root};
    proxy_ssl_name localhost;
    proxy_ssl_server_name on;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host localhost;
    proxy_connect_timeout 5s;
    proxy_read_timeout 120s;
    proxy_next_upstream off;

    client_max_body_size {megabytes}m;
    client_header_timeout 10s;
    client_body_timeout 30s;
    limit_conn address {connections};

    location / {{ return 403; }}
    # As they are written here they go on, whatever the caller wrote.
{calls}
  }}
}}
"""
