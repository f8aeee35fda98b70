"""FPFL on Flower's simulation: a ServerApp and a ClientApp with its Message API, on Ray.

Run in the peer's environment, from the repository's root, with FLWR_TELEMETRY_ENABLED=0:
``.venv-flower/bin/python -m benchmarks.peers.flower_simulation --workload FILE.npz --vector one``.

How it is set up:

- One actor on one CPU, torch with one thread in it. Server, message store and Ray itself run
  beside it.
- A few virtual nodes; every message names the user, sampled from the whole population, whom the
  node plays. The usual set-up is a node for each user of the population (``--nodes population``).
  That is many times slower, since the simulation asks every node in turn whether there is a
  message for it and looks through all messages each time. With a node for each user of a cohort
  of 200 a round still takes a quarter longer than with 50.
- Clipping is in the client and noise in the server, as with Flower's `fixedclipping_mod` and
  `DifferentialPrivacyClientSideFixedClipping`. Not these themselves: they want replies with the
  arrays of the model, which FPFL's vector is not, and divide by zero for a user without samples.
- The model and v travel as one array each, and nothing is evaluated or logged.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch.nn.utils import parameters_to_vector

from benchmarks.peers import flower_client
from benchmarks.peers.fpfl_round import Server, Users
from benchmarks.peers.measuring import Clock, TreeMemory, arguments, check

FEW_NODES = 50


class Rounds:
    """The server's side: sampling, sending, adding, noise, the multipliers and an SGD step."""

    def __init__(self, users: Users, options: dict, nodes: int):
        self.users, self.options, self.nodes = users, options, nodes
        self.server = Server(users)
        self.rng = np.random.default_rng(0)
        self.w = parameters_to_vector(users.parameters).detach()
        self.node_ids: list[int] = []

    def wait_for_nodes(self, grid: Grid) -> None:
        """Until all nodes are registered."""
        while len(self.node_ids) < self.nodes:
            time.sleep(0.1)
            self.node_ids = list(grid.get_node_ids())

    def clipped_sum(self, grid: Grid, cohort: np.ndarray) -> torch.Tensor:
        """Ask a cohort and add up what comes back."""
        arrays = ArrayRecord({"w": Array(self.w.numpy())})
        messages = []
        for position, user in enumerate(cohort.tolist()):
            config = ConfigRecord({**self.options, "user": user})
            content = RecordDict({"arrays": arrays, "config": config})
            everybody = self.nodes == self.users.work.population
            node = self.node_ids[user if everybody else position % self.nodes]
            messages.append(Message(content, node, MessageType.TRAIN))
        total = torch.zeros(self.users.size, dtype=self.users.dtype)
        count = 0
        for reply in grid.send_and_receive(messages):
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error}")
            total += torch.from_numpy(reply.content["arrays"]["v"].numpy())
            count += 1
        if count != len(cohort):
            raise RuntimeError(f"{len(cohort)} users were asked and {count} replied")
        return total

    def sample(self) -> np.ndarray:
        """A cohort, at random without replacement."""
        work = self.users.work
        return self.rng.choice(work.population, size=work.cohort, replace=False)

    def round(self, grid: Grid) -> None:
        """One round, from the sampling to the step."""
        total = self.clipped_sum(grid, self.sample())
        deviation = self.users.work.clip * self.users.work.noise_multiplier
        v = total + torch.from_numpy(self.rng.normal(0, deviation, total.shape)).to(total.dtype)
        self.w -= 0.1 * self.server.direction(v)


def main() -> None:
    """Measure or check."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--nodes", choices=("few", "population"), default="few")
    parser.add_argument("--actors", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    memory = TreeMemory()
    memory.start()
    users = Users(options.workload, options.vector, exact=options.check)
    sent = {
        "workload": os.path.abspath(options.workload),
        "vector": options.vector,
        "exact": options.check,
        "threads": options.threads,
    }
    few = min(FEW_NODES, users.work.cohort)
    nodes = few if options.nodes == "few" else users.work.population
    rounds = Rounds(users, sent, nodes)
    clock = Clock(options.seconds)
    found: list[tuple[list[int], torch.Tensor]] = []
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        rounds.wait_for_nodes(grid)
        if options.check:
            cohort = rounds.sample()
            found.append((cohort.tolist(), rounds.clipped_sum(grid, cohort)))
            return
        rounds.round(grid)
        while not clock.tick():
            rounds.round(grid)

    run_simulation(
        server_app,
        flower_client.app,
        num_supernodes=nodes,
        backend_config={
            "init_args": {
                "num_cpus": options.actors,
                "logging_level": logging.ERROR,
                "log_to_driver": False,
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    if options.check:
        check(users, *found[0])
        return
    version = f"flwr {importlib.metadata.version('flwr')}"
    clock.report(users.work.cohort, memory.peak, version)


if __name__ == "__main__":
    main()
