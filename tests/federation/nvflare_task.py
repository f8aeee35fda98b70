"""A project for NVFlare's jobs, found by name in processes of their own."""

import os
from typing import Any

import federated


def agreement() -> Any:
    return federated.agreement(60, 4, rounds=2, test_seed=5, timeout=60.0, attempts=1)


def load(node: dict[str, Any]) -> Any:
    if node.get("dies"):
        os._exit(1)
    return federated.dealt(agreement())[int(node["partition-id"])]
