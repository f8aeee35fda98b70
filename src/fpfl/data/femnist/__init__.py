"""Unfair FEMNIST: writers' digits in the formats that people have, and the paper's three pens."""

from fpfl.data.femnist.compact import CompactSource, write_compact
from fpfl.data.femnist.finding import BundledDigits, find_digits
from fpfl.data.femnist.leaf import LeafSource
from fpfl.data.femnist.source import Source, Writer
from fpfl.data.femnist.tff import TffSource
from fpfl.data.femnist.unfair import GROUPS, unfair_digits, write_unfair_digits

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
