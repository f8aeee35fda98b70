"""What happens between users and server: clipping, noise, sums."""

from fpfl.thirdparty.clipping import ClipRule, DenseRows, Rows, clip, clip_rules, clipped_sum
from fpfl.thirdparty.discrete import discrete_gaussian
from fpfl.thirdparty.noise import NoiseSource, SeededNoise, SystemNoise
from fpfl.thirdparty.sums import ThirdParty

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
