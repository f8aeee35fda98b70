"""How figures were made: on which machine, with what, when."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch


def about_this_run(command: str, seconds: float | None) -> dict[str, Any]:
    """What a reader needs to place the figures: command, machine, versions, date."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wall_seconds": seconds if seconds is None else round(seconds, 1),
    }
