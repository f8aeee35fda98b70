"""``fpfl train --data people.csv ...``: from a table and a few options to a config.

The config is what is trained, by the one path that configs have; what was left open is filled in
by the rules of the scikit-learn estimators, from public numbers where ε is claimed.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fpfl.config import Config, Loaded, config_of, load_data, make_constraint, make_model
from fpfl.config.sections import NO_CONSTRAINT
from fpfl.data.federated import FederatedDataset
from fpfl.data.schema import DRAFTED, Schema
from fpfl.data.table_schema import (
    TableSchema,
    read_table_schema,
    toml_value,
)
from fpfl.estimator.data import DEFAULT_TOLERANCE
from fpfl.privacy.settings import Privacy
from fpfl.training.defaults import (
    PLAIN_ROUNDS,
    ROUNDS,
    chosen_clip,
    chosen_cohort,
    chosen_method,
    chosen_rate,
    parameters_of,
)
from fpfl.training.inputs import Inputs

Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class TableOptions:
    """What ``fpfl train --data`` was given."""

    data: Path
    schema: Path | None = None
    label: str | None = None
    user: str | None = None
    groups: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    ledger: Path | None = None
    constraint: str | None = None
    tolerance: float | None = None
    cohort: int | None = None
    rounds: int | None = None
    test: str | None = None
    hidden: str | None = None
    seed: int | None = None
    measure: bool = True
    reference: bool = False

    @property
    def by(self) -> list[str | list[str]]:
        """What to group by: ``sex,race`` both, ``sex+race`` their intersections."""
        items = [item.strip() for item in (self.groups or "").split(",") if item.strip()]
        return [[part.strip() for part in i.split("+")] if "+" in i else i for i in items]

    @property
    def attributes(self) -> list[str]:
        """The attributes that groups are made by, each once."""
        parts = [[item] if isinstance(item, str) else item for item in self.by]
        return list(dict.fromkeys(name for part in parts for name in part))


@dataclass(frozen=True)
class Planned:
    """A config that was made from options.

    ``text`` is what a run folder keeps of it; ``loaded`` is its data, which was looked at for K
    (and without ε for the number of rows a user has); ``notes`` is what to tell beforehand.
    """

    text: str
    config: Config
    loaded: Loaded
    notes: tuple[str, ...]


def planned(options: TableOptions, folder: Path, partition_seed: int) -> Planned:
    """The config for a table; paths are relative to the folder."""
    schema, origin = schema_of(options)
    _check(options, schema, origin)
    sections = _sections(options, schema)
    config = config_of(_text(sections, schema), "the options of fpfl train")
    people, test = loaded = load_data(config, folder, partition_seed)
    _fill(sections, config, options, _public(options, people), people.K)
    text = f"# fpfl train --data {options.data.name}\n{_text(sections, schema)}"
    config = config_of(text, "the options of fpfl train")
    notes = _notes(options, schema, origin, people, tested=test is not None)
    return Planned(text, config, loaded, notes)


def free_folder(data: Path) -> Path:
    """A folder for a run that is not there yet: out/people, out/people-2, ..."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need the run's folder by name; give --out FOLDER")
    first = Path("out") / data.stem
    numbered = (Path("out") / f"{data.stem}-{number}" for number in range(2, 10_000))
    return next(path for path in (first, *numbered) if not path.exists())


def schema_of(options: TableOptions) -> tuple[TableSchema, Path]:
    """The schema that was named, or lies beside the table."""
    data = options.data
    if not data.is_file():
        raise ValueError(f"--data {data} is no file; give a CSV or a Parquet file")
    if options.schema is not None:
        return read_table_schema(options.schema), options.schema
    new = data.with_suffix(".schema.toml")
    for path in (new, data.with_suffix(".toml")):
        if path.is_file() and not _is_config(path):
            return read_table_schema(path), path
    words = ["fpfl data draft", str(data), "--label", options.label or "COLUMN"]
    words += ["--user", options.user] if options.user else []
    words += ["--groups", ",".join(options.attributes)] if options.attributes else []
    raise ValueError(
        f"{data} has no schema, which declares what is public about its columns: give "
        f"--schema FILE, or put {new.name} beside it. For a draft to check: {' '.join(words)}"
    )


def _is_config(path: Path) -> bool:
    return "[training]" in path.read_text(encoding="utf-8", errors="replace")


def _check(options: TableOptions, schema: TableSchema, origin: Path) -> None:
    if options.epsilon is not None and schema.source == "data":
        raise ValueError(DRAFTED.format(where=origin))
    for flag, given, declared in (
        ("--label", options.label, schema.label.column),
        ("--user", options.user, schema.user),
    ):
        if given is not None and given != declared:
            raise ValueError(f"{flag} is {given!r}, and {origin} declares {declared!r}; change one")
    known = [attribute.name for attribute in schema.attributes]
    strange = [name for name in options.attributes if name not in known]
    if strange:
        raise ValueError(
            f"--groups names {strange}, and {origin} declares the attributes {known}; declare "
            "their values there, under [attributes]"
        )
    if not options.by and (options.constraint is not None or options.tolerance is not None):
        raise ValueError("--constraint and --tolerance compare groups; give --groups, too")
    if options.reference and not options.by:
        raise ValueError(f"--reference: {NO_CONSTRAINT}")
    alone = {"--delta": options.delta, "--ledger": options.ledger}
    for flag, value in alone.items():
        if value is not None and options.epsilon is None:
            raise ValueError(f"{flag} goes with --epsilon; give both, or neither")


def _sections(options: TableOptions, schema: TableSchema) -> Sections:
    """What the options say; what they leave open is filled in when the data is there."""
    sections: Sections = {
        "data": {"table": options.data.as_posix()}
        | _test(options.test)
        | ({} if options.measure else {"measure": False}),
        "training": {"suggested": bool(options.by and options.epsilon is not None)}
        | ({"reference": True} if options.reference else {}),
    }
    if options.hidden is not None:
        sections["model"] = {"hidden": _hidden(options.hidden)}
    training = sections["training"]
    plain = PLAIN_ROUNDS if options.epsilon is None and not options.by else ROUNDS
    training["rounds"] = plain if options.rounds is None else options.rounds
    training["cohort"] = 1 if options.cohort is None else options.cohort
    if options.seed is not None:
        training["seed"] = options.seed
    if options.by:
        classes = schema.label.classes
        usual = "equal_error" if classes is None else "accuracy_parity"
        sections["constraint"] = {
            "kind": options.constraint
            or ("equalized_odds" if classes is not None and len(classes) == 2 else usual),
            "by": options.by,
            "tolerance": DEFAULT_TOLERANCE if options.tolerance is None else options.tolerance,
        }
        sections["method"] = {"kind": "one-gradient"}
    if options.epsilon is not None:
        sections["privacy"] = {"epsilon": options.epsilon}
        if options.delta is not None:
            sections["privacy"]["delta"] = options.delta
        if options.ledger is not None:
            sections["privacy"]["ledger"] = options.ledger.as_posix()
    return sections


def _test(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        share = float(given)
    except ValueError:
        return {"test": Path(given).as_posix()}
    if not 0.0 < share < 1.0:
        raise ValueError(f"--test is {given}; expected a file, or a share of the users like 0.2")
    return {"held_out": share}


def _hidden(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"--hidden is {given!r}; expected sizes of layers, e.g. 16,8") from error


def _public(options: TableOptions, people: FederatedDataset) -> Schema:
    """The schema with how many rows a user has: declared, or counted where ε is not claimed."""
    schema = people.schema
    if schema.samples_per_user is not None:
        return schema
    if options.epsilon is not None:
        raise ValueError(
            "the settings for --epsilon follow from how many rows a user is expected to have, and "
            "the schema does not say; declare samples_per_user = ... in it"
        )
    return replace(schema, samples_per_user=len(people) / people.population)


def _fill(
    sections: Sections, config: Config, options: TableOptions, schema: Schema, population: int
) -> None:
    """Cohort, learning rate and clip bounds, where they were left open, by the rules."""
    training, rounds = sections["training"], config.training.rounds
    if options.cohort is None:
        training["cohort"] = chosen_cohort(population)
    constraint = make_constraint(config, schema)
    privacy = None
    if options.epsilon is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training itself will say what there is to say
            clip = chosen_clip(
                None,
                Privacy(options.epsilon, None, 1.0, options.delta),
                constraint,
                schema,
                population=population,
                cohort=training["cohort"],
                rounds=rounds,
                parameters=parameters_of(make_model(config, schema)),
            )
        given = {name: value for name, value in asdict(clip).items() if value is not None}
        adapts = given.pop("adapts", None)
        sections["privacy.clip"] = given
        if adapts is not None:
            sections["privacy.clip.adapts"] = {n: v for n, v in adapts.items() if v is not None}
        privacy = Privacy(options.epsilon, None, clip, options.delta)
    if not config.training.suggested:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training itself will say what there is to say
            training["learning_rate"] = chosen_rate(
                privacy, constraint, schema, population, training["cohort"], rounds
            )
    if constraint is not None:
        method = chosen_method(constraint, schema, private=privacy is not None, rounds=rounds)
        own: dict[str, Any] = {"patience": "none" if method.patience is None else method.patience}
        if privacy is None:
            own |= {
                "damping": method.damping,
                "tolerance": "constraint" if method.tolerance is None else method.tolerance,
                "spread": "none" if method.spread is None else method.spread,
            }
        sections["method"] |= own
    if constraint is None:
        # The best of many cohorts is picked by chance where there is nothing else to judge by.
        training["selection"] = "average"


def _text(sections: Sections, schema: TableSchema) -> str:
    parts = []
    for name, values in sections.items():
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
        if name == "data":
            parts.append(schema.toml("data.schema"))
    return "\n".join(parts)


def _notes(
    options: TableOptions,
    schema: TableSchema,
    origin: Path,
    people: FederatedDataset,
    *,
    tested: bool,
) -> tuple[str, ...]:
    notes = [f"Schema: {origin}"]
    if schema.source == "data":
        notes.append(
            f"{origin} was drafted from the data: check it before you train with --epsilon."
        )
    if options.epsilon is None:
        notes.append("WITHOUT privacy: the model may reveal its training data. Give --epsilon 2.")
    else:
        unit = "a row"
        if schema.user is not None:
            unit = f"all rows of a user (one value of {schema.user!r})"
        notes.append(f"ε protects {unit}.")
        if schema.user is None:
            notes.append(
                "No user column: every row is a user, and who has several rows is protected less. "
                "Declare user = COLUMN in the schema if there is one."
            )
        if schema.population is None:
            notes.append(
                f"K = {people.population} is the number of training users in the file, which ε "
                "takes for public; declare population = ... in the schema if you know a public "
                "number."
            )
    found = Inputs.of(people, None, measure=options.measure)
    if found is not None and found.wanted:
        names = ", ".join(column.name for column in found.wanted)
        how = "exactly" if options.epsilon is None else "once, privately, within ε"
        notes.append(
            f"Measured {how}, to scale them, before the first round: {names}. Declare what is "
            "public about them (centre, scale, shares), or give --no-measure."
        )
    if not options.by:
        names = ",".join(a.name for a in schema.attributes) or "sex"
        notes.append(
            "No --groups: differences between groups are not limited. To limit them, give e.g. "
            f"--groups {names}."
        )
    if options.reference:
        more = (
            ""
            if options.epsilon is None
            else (" It is private by itself, and what both cost adds up.")
        )
        notes.append(f"--reference: the same is trained without the constraint, too.{more}")
    if not tested:
        notes.append("No --test: --test 0.2 holds a fifth of the users out, to evaluate on.")
    return tuple(notes)
