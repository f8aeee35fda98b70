"""Imported once by the server that test processes are forked from: all that is slow to begin."""

import warnings

import torch
from conftest import make_population

import fpfl

torch.set_num_threads(1)  # a thread of its own would not live in a fork
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # dp-accounting and torch's own beginnings, through a run like those to come.
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=1.0)
    fpfl.train(
        fpfl.mlp(5, (4,), seed=0),
        make_population(),
        cohort=6,
        rounds=2,
        constraint=fpfl.fnr_parity("sex"),
        privacy=privacy,
    )
