"""A federation over a real network: users' data stays where it is, and sums are all that is seen.

Importing this imports nothing; names are imported when they are used. `fpfl.federation.flower` has
the apps, for which the extra ``fpfl[flower]`` is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfl.federation.agreement import Agreement
    from fpfl.federation.flower.client import client_app
    from fpfl.federation.flower.server import server_app
    from fpfl.federation.rounds import FederationError, federate
    from fpfl.federation.secagg import Authority

_HOMES = {
    "Agreement": "fpfl.federation.agreement",
    "Authority": "fpfl.federation.secagg",
    "FederationError": "fpfl.federation.rounds",
    "client_app": "fpfl.federation.flower.client",
    "federate": "fpfl.federation.rounds",
    "server_app": "fpfl.federation.flower.server",
}

__all__ = ["Agreement", "Authority", "FederationError", "client_app", "federate", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("flwr", "cryptography"):
            raise
        raise ModuleNotFoundError(
            f"fpfl.federation needs {missing}: pip install 'fpfl[flower]'", name=error.name
        ) from error
    return value
