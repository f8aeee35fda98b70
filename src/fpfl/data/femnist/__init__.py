"""Unfair FEMNIST: writers' digits in the formats that people have, and the paper's three pens."""

from fpfl.data.femnist.bundled import BundledDigits
from fpfl.data.femnist.compact import CompactSource
from fpfl.data.femnist.compacting import write_compact
from fpfl.data.femnist.finding import find_digits
from fpfl.data.femnist.leaf import LeafSource
from fpfl.data.femnist.population import unfair_digits, write_unfair_digits
from fpfl.data.femnist.source import Source, Writer
from fpfl.data.femnist.tff import TffSource
from fpfl.data.femnist.unfair import GROUPS

__all__ = [
    "GROUPS",
    "BundledDigits",
    "CompactSource",
    "LeafSource",
    "Source",
    "TffSource",
    "Writer",
    "find_digits",
    "unfair_digits",
    "write_compact",
    "write_unfair_digits",
]
