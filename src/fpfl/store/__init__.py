"""What is written down: files that are only ever added to, and that show it when they were not."""

from fpfl.store.chain import Chain
from fpfl.store.files import BusyError
from fpfl.store.lines import FORMAT, ChainError

__all__ = ["FORMAT", "BusyError", "Chain", "ChainError"]
