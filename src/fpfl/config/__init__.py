"""Configs: a training written down as TOML, checked before anything runs."""

from fpfl.config.data import (
    Loaded,
    check_same_people,
    load_data,
    load_people,
    table_schema,
    with_schema,
)
from fpfl.config.files import (
    config_of,
    load_config,
    load_run_config,
    make_constraint,
    make_method,
    make_model,
    run_config,
    train_keywords,
)
from fpfl.config.sections import Config
from fpfl.config.sweeps import SweepFile, load_sweep

__all__ = [
    "Config",
    "Loaded",
    "SweepFile",
    "check_same_people",
    "config_of",
    "load_config",
    "load_data",
    "load_people",
    "load_run_config",
    "load_sweep",
    "make_constraint",
    "make_method",
    "make_model",
    "run_config",
    "table_schema",
    "train_keywords",
    "with_schema",
]
