"""The users' side of `flower_simulation`.

A module of its own: Ray's actors then import it by name, where what a script defines in its main
module is pickled, with all that it refers to, into every message.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.utils import vector_to_parameters

from benchmarks.peers.fpfl_round import Users, Vector

app = ClientApp()


@lru_cache(maxsize=1)
def _users(path: str, vector: Vector, exact: bool) -> Users:
    """Data and model, kept in the actor's process from one message to the next."""
    return Users(path, vector, exact=exact)


@app.train()
def train(message: Message, context: Context) -> Message:
    """v of the user that the message names, clipped."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    users = _users(config["workload"], config["vector"], config["exact"])
    w = torch.from_numpy(message.content["arrays"]["w"].numpy())
    vector_to_parameters(w, users.parameters)
    v = users.vector(*users.samples(config["user"]))
    norm = float(v.norm())
    if norm > users.work.clip:
        v *= users.work.clip / norm
    return Message(RecordDict({"arrays": ArrayRecord({"v": Array(v.numpy())})}), reply_to=message)
