"""What happens between users and server: clipping, noise, sums."""

from fpfl.aggregation.clipping import ClipRule, DenseRows, Rows, clip, clip_rules, clipped_sum
from fpfl.aggregation.noise import NoiseSource, SeededNoise, SystemNoise, discrete_gaussian
from fpfl.aggregation.sums import ThirdParty

__all__ = [
    "ClipRule",
    "DenseRows",
    "NoiseSource",
    "Rows",
    "SeededNoise",
    "SystemNoise",
    "ThirdParty",
    "clip",
    "clip_rules",
    "clipped_sum",
    "discrete_gaussian",
]
