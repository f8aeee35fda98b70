"""Where our own lines go: Flower keeps what an app writes, and shows only that."""

from __future__ import annotations

import logging
import sys

_FORMAT = "fpfl: %(message)s"


def show() -> None:
    """Write the lines of `fpfl.federation` to standard output, once."""
    logger = logging.getLogger("fpfl.federation")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
