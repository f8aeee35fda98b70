"""The data of a config: a data set by name, an .npz file, a table, or a population folder."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fpfl.config.sections import Config, SchemaConfig
from fpfl.data.federated import FederatedDataset
from fpfl.data.files import open_population
from fpfl.data.loaders import REGISTER
from fpfl.data.schema import DRAFTED, Attribute, Schema, scale_by_ranges
from fpfl.data.table_schema import TableSchema, read_table_schema
from fpfl.data.tables import read_table, table_and_ids
from fpfl.runs.fingerprints import data_fingerprint
from fpfl.runs.folder import TABLE_SCHEMA, OpenRun
from fpfl.server.ranks import Ranks

Loaded = tuple[FederatedDataset, FederatedDataset | None]
"""Training and test data."""

_COLUMNS = ("features", "labels", "attributes", "users")
"""What an .npz file may hold; anything else in it is left alone."""


def load_data(
    config: Config,
    folder: Path,
    partition_seed: int | None = None,
    *,
    private: bool | None = None,
) -> Loaded:
    """The training and the test data of a config whose paths are relative to a folder.

    ``private``: whether ε is claimed for them; it is where the config has [privacy].
    """
    d = config.data
    if d.table is not None:
        private = config.privacy is not None if private is None else private
        return _load_tables(config, folder, partition_seed, private)
    if d.train is not None:
        assert d.declared is not None  # the section checked it
        test = _load_file(folder / d.test, d.declared, None) if d.test else None
        return _load_file(folder / d.train, d.declared, d.declared.population), test
    if d.folder is not None:
        people = open_population(folder / d.folder)
        test = open_population(folder / d.test) if d.test else None
        differ = people.schema.difference(test.schema) if test is not None else None
        if differ:
            raise ValueError(f"{d.folder} and {d.test} are not of the same kind: {differ}")
        return people, test
    assert d.name is not None  # the section checked it
    seed = _partition_seed(config, partition_seed)
    people, held_out = REGISTER[d.name].load(seed=seed, **d.settings)
    return people, held_out


def _load_tables(config: Config, folder: Path, partition_seed: int | None, private: bool) -> Loaded:
    d = config.data
    assert d.table is not None  # whoever calls this has looked
    schema = table_schema(config, folder)
    if private and schema.source == "data":
        raise ValueError(DRAFTED.format(where=d.schema_file or "[data.schema]"))
    table = folder / d.table
    people, ids = table_and_ids(table, schema)
    if d.held_out is not None:
        return people.split(d.held_out, seed=_partition_seed(config, partition_seed))
    if d.test is None:
        return people, None
    if table.samefile(folder / d.test):
        raise ValueError(
            f"{d.test} is the table that is trained on; test on other people, or hold some of "
            "these out: held_out = 0.2 in a config, --test 0.2 with --data"
        )
    # K is that of the people who are trained on.
    test, others = table_and_ids(folder / d.test, replace(schema, population=None))
    if ids & others:
        raise ValueError(
            f"{len(ids & others)} users of {d.test} are in {d.table}, too, by their ids in the "
            f"column {schema.user!r}; take them out of one of the two, or give ids of their own to "
            "people who are others"
        )
    return people, test


def check_same_people(config: Config, people: FederatedDataset, run: OpenRun) -> None:
    """Refuse a table that is no longer the one that a run drew its held-out users from.

    Who is held out follows from a user's place among all, so that one row more may move people
    from the one part to the other.
    """
    if config.data.held_out is None:
        return
    if data_fingerprint(people) != run.fingerprints["data"]:
        raise ValueError(
            f"{config.data.table} (or its schema, or held_out) is not what {run.path} was begun "
            "with, so that users who were trained on may be among those held out now. Put it back "
            "as it was; or evaluate on other people (fpfl evaluate --data FILE), or start a new "
            "run. For users who leave there is fpfl withdraw"
        )


def table_schema(config: Config, folder: Path) -> TableSchema:
    """The schema of a config's table."""
    d = config.data
    if d.columns is not None:
        return d.columns
    assert d.schema_file is not None  # the section checked it
    return read_table_schema(folder / d.schema_file)


def with_schema(config: Config, folder: Path) -> tuple[Config, dict[str, str]]:
    """A config with the schema that is in a file now, and what a run folder keeps of it.

    The file may be edited later; what is trained is what it says now.
    """
    if config.data.schema_file is None:
        return config, {}
    schema = table_schema(config, folder)
    data = config.data.model_copy(update={"columns": schema})
    return config.model_copy(update={"data": data}), {TABLE_SCHEMA: schema.toml()}


def with_kept_schema(config: Config, run: Path) -> Config:
    """The config of a run, with the schema that its folder keeps."""
    kept = run.resolve() / TABLE_SCHEMA
    if config.data.schema_file is None or not kept.is_file():
        return config
    data = config.data.model_copy(update={"schema_file": kept})
    return config.model_copy(update={"data": data})


def _partition_seed(config: Config, given: int | None) -> int | None:
    # Unseeded, but the same for all processes of one training.
    return Ranks.current().agreed_seed(config.training.seed if given is None else given)


def load_people(config: Config, path: Path, folder: Path = Path()) -> FederatedDataset:
    """Further people of the kind that a config trains on; ``folder`` is where the config was.

    An .npz file, a table or a population folder.
    """
    if path.is_dir():
        return open_population(path)
    if config.data.table is not None:
        schema = table_schema(config, folder)
        if schema.source == "data":
            raise ValueError(DRAFTED.format(where=config.data.schema_file or "[data.schema]"))
        return read_table(path, replace(schema, population=None))
    if config.data.declared is None:
        raise ValueError(
            f"{path} is a file, and its schema is not in the config; give a population folder"
        )
    return _load_file(path, config.data.declared, None)


def _load_file(path: Path, declared: SchemaConfig, population: int | None) -> FederatedDataset:
    try:
        # Mapped, so that a bare array, which is refused, is not read first.
        file = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one bare array")
        with file:
            found = sorted(file.files)
            assert file.zip is not None  # it is open
            _check_size(file.zip)
            arrays = {name: file[name] for name in _COLUMNS if name in file.files}
    except Exception as error:  # there is no telling what a damaged archive raises
        raise ValueError(f"{path} cannot be read as an .npz file: {_reason(error)}") from error
    # An entry that is no array is handed out as bytes.
    arrays = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    missing = {"features", "labels"} - set(arrays)
    if missing:
        raise ValueError(f"{path} lacks the arrays {sorted(missing)}; it has {found}")
    try:
        return _dataset(arrays, declared, population)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {_reason(error)}") from error


def _check_size(archive: zipfile.ZipFile) -> None:
    """Refuse more than this machine's memory before any of it is asked for: an archive is small."""
    names = {f"{name}.npy" for name in _COLUMNS}
    size = sum(entry.file_size for entry in archive.infolist() if entry.filename in names)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(
            f"its arrays take {size / 2**30:,.1f} GiB and this machine has {memory / 2**30:,.1f}; "
            "give a population folder, which is read in pieces, or fewer samples"
        )


def _dataset(
    arrays: dict[str, NDArray[Any]], declared: SchemaConfig, population: int | None
) -> FederatedDataset:
    schema = Schema(
        shape=tuple(arrays["features"].shape[1:]),
        classes=declared.classes if declared.label_range is None else None,
        label_range=declared.label_range,
        attributes=tuple(
            Attribute(name, tuple(values), unknown=name in declared.unknown)
            for name, values in declared.attributes.items()
        ),
        population=population,
        samples_per_user=declared.samples_per_user,
        feature_ranges=tuple(declared.feature_ranges) if declared.feature_ranges else None,
        class_weights=None if declared.class_weights is None else tuple(declared.class_weights),
    )
    features = arrays["features"]
    if declared.feature_ranges is not None:
        features = scale_by_ranges(features, declared.feature_ranges)
    return FederatedDataset.from_samples(
        features,
        arrays["labels"],
        arrays.get("attributes"),
        schema,
        users=arrays.get("users"),
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
