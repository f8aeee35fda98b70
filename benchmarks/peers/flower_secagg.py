"""Flower's own SecAgg+ (`SecAggPlusWorkflow` and `secaggplus_mod`): one round, timed.

Run in the peer's environment, from the repository's root, with FLWR_TELEMETRY_ENABLED=0:
``.venv-flower/bin/python -m benchmarks.peers.flower_secagg --how direct --clients 200``.

- ``direct``: server and clients in one process. A stand-in for the grid hands each message to
  `secaggplus_mod` and gives its reply back, so that what is timed is the protocol's own work, by
  stage, on both sides.
- ``simulation``: the usual way, on Ray, with one actor on one CPU. What is timed is a round from
  the first message to the last, after all nodes have registered; "setup" has the start of the
  actor in it.

Shares and threshold are what fpfl's graph has: k + 1 and t. Clients have a ready vector.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import time
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import (
    arrayrecord_to_parameters,
    fitres_to_recorddict,
    parameters_to_arrayrecord,
)
from flwr.server import LegacyContext, ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
VALUE = 0.25

app = ClientApp(mods=[secaggplus_mod])


def reply_of(message: Message) -> Message:
    """A client that has trained: the vector is as long as the one that came."""
    sent = arrayrecord_to_parameters(message.content.array_records["fitins.parameters"], True)
    size = parameters_to_ndarrays(sent)[0].size
    trained = FitRes(Status(Code.OK, ""), vector(size), 1, {})
    return Message(fitres_to_recorddict(trained, False), reply_to=message)


def vector(size: int) -> Any:
    """What a client answers and the server expects as the mean."""
    return ndarrays_to_parameters([np.full(size, VALUE, np.float32)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """What `secaggplus_mod` calls for the vector."""
    return reply_of(message)


class Direct:
    """Stands in for the grid: every message is answered at once, in this process."""

    def __init__(self, clients: int):
        self.contexts = {
            nid: Context(1, nid, {}, RecordDict(), {}) for nid in range(1, clients + 1)
        }
        self.seconds = 0.0

    def send_and_receive(self, messages: list[Message], timeout: Any = None) -> list[Message]:
        """The replies, with a clock around the clients."""
        replies = []
        for message in messages:
            # A copy, as on a network: the mod takes fields out of the message.
            content = RecordDict({key: _copied(value) for key, value in message.content.items()})
            message = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
            context = self.contexts[message.metadata.dst_node_id]
            start = time.perf_counter()
            reply = secaggplus_mod(message, context, lambda sent, _: reply_of(sent))
            self.seconds += time.perf_counter() - start
            replies.append(reply)
        return replies


def _copied(record: Any) -> Any:
    return ConfigRecord(dict(record)) if isinstance(record, ConfigRecord) else record


def legacy_context(context: Context, grid: Any, nodes: list[int], size: int) -> LegacyContext:
    """What the workflow wants to find: the parameters, the round, all clients."""
    manager = SimpleClientManager()
    for nid in nodes:
        proxy: ClientProxy = GridClientProxy(nid, grid, 1)
        manager.register(proxy)
    strategy = FedAvg(min_fit_clients=len(nodes), min_available_clients=len(nodes))
    found = LegacyContext(context, ServerConfig(num_rounds=1), strategy, manager)
    start = parameters_to_arrayrecord(vector(size), False)
    found.state.array_records[MAIN_PARAMS_RECORD] = start
    found.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    return found


def one_round(grid: Any, context: LegacyContext, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by stage, of all clients (where the grid has a clock) and of the rest."""
    workflow = SecAggPlusWorkflow(options.shares, options.threshold)
    state = WorkflowState()
    found: dict[str, Any] = {"clients_seconds": {}, "server_seconds": {}}
    for stage in STAGES:
        before, start = getattr(grid, "seconds", 0.0), time.perf_counter()
        if not getattr(workflow, f"{stage}_stage")(grid, context, state):
            raise SystemExit(f"Flower's workflow gave up at {stage}")
        whole = time.perf_counter() - start
        clients = getattr(grid, "seconds", 0.0) - before
        found["clients_seconds"][stage] = round(clients, 4)
        found["server_seconds"][stage] = round(whole - clients, 4)
    record = context.state.array_records[MAIN_PARAMS_RECORD]
    mean = next(iter(record.values())).numpy()
    if not np.allclose(mean, VALUE, atol=1e-2):
        raise SystemExit(f"the mean is {mean[:3]}..., and {VALUE} was expected")
    whole = sum(found["clients_seconds"].values()) + sum(found["server_seconds"].values())
    return {"whole_seconds": round(whole, 3), **found}


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """One round on Ray."""
    from flwr.simulation import run_simulation

    from benchmarks.peers import flower_secagg as by_name  # actors import it, nothing is pickled

    results: list[dict[str, Any]] = []
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Any, context: Context) -> None:
        nodes: list[int] = []
        while len(nodes) < options.clients:
            time.sleep(0.1)
            nodes = list(grid.get_node_ids())
        results.append(one_round(grid, legacy_context(context, grid, nodes, options.size), options))

    run_simulation(
        server_app,
        by_name.app,
        num_supernodes=options.clients,
        backend_config={
            "init_args": {"num_cpus": 1, "logging_level": logging.ERROR, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    return {"whole_seconds": results[0]["whole_seconds"], "stages": results[0]["server_seconds"]}


def main() -> None:
    """Measure one round and print it as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=("direct", "simulation"), required=True)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--size", type=int, default=3100)
    parser.add_argument("--shares", type=int, default=27)
    parser.add_argument("--threshold", type=int, default=17)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if options.how == "simulation":
        found = simulated(options)
    else:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # who sends
        grid = Direct(options.clients)
        context = Context(1, 0, {}, RecordDict(), {})
        found = one_round(
            grid, legacy_context(context, grid, list(grid.contexts), options.size), options
        )
    asked = {name: getattr(options, name) for name in ("clients", "size", "shares", "threshold")}
    version = f"flwr {importlib.metadata.version('flwr')}"
    print(json.dumps({**asked, **found, "version": version}), flush=True)


if __name__ == "__main__":
    main()
