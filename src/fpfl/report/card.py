"""The model card: what a model is, what it was trained on, what is promised and what is not.

Every figure is one of the run's own files (or of the evaluation that was given). What only the
model's owner can know is left for them to fill in, and says so.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpfl.report.evaluations import SIMULATION_ONLY, Evaluated
from fpfl.report.facts import IN_MEMORY, judged_by, record_of, verdict_on
from fpfl.report.reading import RunRecord
from fpfl.report.series import bound_course, windows
from fpfl.report.words import (
    AGAINST_HEAD,
    WINDOW_HEAD,
    against_lines,
    against_rows,
    balance_lines,
    balance_rows,
    banners,
    class_words,
    collapses,
    headline,
    is_regression,
    levelled_lines,
    method_name,
    number,
    percent,
    rates_of,
    score_word,
    source_mark,
    trained_lines,
    what_was_trained,
    when_and_with,
    window_lines,
    window_rows,
    with_interval,
)

if TYPE_CHECKING:
    from fpfl.data.schema import Schema
    from fpfl.fairness.evaluation import Evaluation
    from fpfl.heldout.result import PrivateEvaluation
    from fpfl.training.run import Run

LONGEST = 300
"""Characters of one name or sentence that are shown."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)", re.IGNORECASE)
"""Where an address is cut in two, so that no reader of Markdown makes a link of it."""


def plain(text: object, longest: int = LONGEST) -> str:
    """Any text as one line of Markdown that says just that: no markup, no HTML, no table cells."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if len(line) > longest:
        line = f"{line[: longest - 1]}…"
    return _LINK.sub("<!-- -->", _SPECIAL.sub(r"\\\1", html.escape(line, quote=False)))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table; the cells are text, and are escaped here."""
    lines = [f"| {' | '.join(map(plain, head))} |", f"| {' | '.join('---' for _ in head)} |"]
    return [*lines, *(f"| {' | '.join(map(plain, row))} |" for row in rows)]


def bullets(items: Iterable[object]) -> list[str]:
    """A list of sentences, as long as they are."""
    return [f"- {plain(item, 10_000)}" for item in items]


TO_FILL = "To be filled in by whoever publishes this model:"
NOT_SAID = "The run does not say."
SHOWN = 30
"""Features that are named."""

PAPER = (
    "Borja Rodríguez-Gálvez, Filip Granqvist, Rogier van Dalen and Matt Seigel: Enforcing fairness "
    "in private federated learning via the modified method of differential multipliers. "
    "arXiv:2109.08604, 2021."
)

_UNCOVERED = (
    "ε covers the training alone. It does not cover what was read from the data before it (means, "
    "vocabularies, ranges, lists of values), evaluations without noise, or settings that were "
    "chosen by looking at results on the same users.",
    "Equal rates between the groups named here say nothing about groups that are not named, about "
    "their intersections where these are not, or about single people.",
    "A gap can be small because everybody is treated badly: read it beside the accuracy and each "
    "group's own rate.",
)


def model_card(
    run: str | Path | Run | RunRecord,
    *,
    name: str | None = None,
    schema: Schema | None = None,
    evaluation: Evaluation | None = None,
    training: Evaluation | None = None,
    private: PrivateEvaluation | None = None,
) -> str:
    """A model card in Markdown, with front matter as the Hugging Face hub reads it.

    Parameters
    ----------
    run
        A run folder, or a run in memory.
    name
        What the model is called; the folder's name where it is not given.
    schema
        The data's schema, for a run without a folder.
    evaluation, training
        Evaluations without noise (``run.evaluate``) on a test set, and on the training population;
        beside those in the folder. They are marked "simulation only".
    private
        An evaluation that was released under its own ε.
    """
    record = record_of(run, schema=schema, test=evaluation, training=training, private=private)
    title = name or ("model" if record.folder == IN_MEMORY else record.name)
    sections = [
        _front(record),
        [f"# Model card: {plain(title)}"],
        _banners(record),
        ["## What it is", "", *(plain(words, 2000) for words in what_was_trained(record))],
        ["## Intended use", "", *_to_fill(
            "what the model is for, and who is affected by its predictions",
            "what it must not be used for",
            "who is responsible for it, and how to reach them",
        )],
        ["## Data", "", *_data(record)],
        ["## Groups", "", *_groups(record)],
        ["## Training", "", *table(("setting", "value"), _training(record))],
        ["## Privacy", "", plain(headline(record)), "", *bullets(record.statement or [NOT_SAID])],
        ["## How good, and how even between groups", "", *_results(record)],
        ["## Limits", "", *bullets(_limits(record))],
        ["## Provenance", "", *bullets(_provenance(record))],
        ["## Citation", "", plain(PAPER, 1000)],
    ]  # fmt: skip
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _front(record: RunRecord) -> list[str]:
    task = "tabular-regression" if is_regression(record) else "tabular-classification"
    shape = (record.schema or {}).get("shape") or ()
    tags = ["fairness", "federated-learning"]
    tags += ["differential-privacy"] if record.privacy is not None else []
    score = "mae" if is_regression(record) else "accuracy"
    lines = ["---", "library_name: fpfl", "tags:", *(f"  - {tag}" for tag in tags)]
    lines += ["metrics:", f"  - {score}"]
    lines += [f"pipeline_tag: {task}"] if len(shape) == 1 else []
    return [*lines, "# license: to be chosen by whoever publishes this model", "---"]


def _banners(record: RunRecord) -> list[str]:
    lines = [
        f"> **{plain(b.title)}.** {plain(b.text, 1000)}"
        for b in [*collapses(record), *banners(record)]
    ]
    if not record.finished:
        lines.append("> **Not finished.** The run has not ended: there is no final model yet.")
    return "\n>\n".join(lines).splitlines()


def _to_fill(*points: str) -> list[str]:
    return [TO_FILL, "", *(f"- {point}" for point in points)]


def _data(record: RunRecord) -> list[str]:
    schema = record.schema
    rows: list[tuple[str, str]] = [("users", _count(record.settings.get("population")))]
    if schema is None:
        missing = f"{NOT_SAID} (there is no schema.json, and no schema was given)"
        return [*table(("data", "value"), [*rows, ("features", missing)]), "", *_origin()]
    names, ranges = schema.get("feature_names"), schema.get("feature_ranges")
    shape = " × ".join(map(str, schema.get("shape") or ()))
    rows.append(("features of a sample", shape))
    if names:
        more = "" if len(names) <= SHOWN else f", and {len(names) - SHOWN} more"
        rows.append(("features", f"{', '.join(map(str, names[:SHOWN]))}{more}"))
    rows.append(("scaled by declared public ranges", "yes" if ranges else "not declared"))
    if schema.get("classes") is None:
        rows.append(("label range (declared)", str(schema.get("label_range"))))
    else:
        rows.append(("classes", class_words(schema) or str(schema["classes"])))
    expected = schema.get("samples_per_user")
    rows.append(("samples per user (declared)", NOT_SAID if expected is None else f"{expected:g}"))
    lines = [f"| {plain(name)} | {plain(value, 2000)} |" for name, value in rows]
    return [*table(("data", "value"), []), *lines, "", *_origin()]


def _origin() -> list[str]:
    return _to_fill("where the data comes from, who is in it and who is not", "how consent was had")


def _groups(record: RunRecord) -> list[str]:
    attributes = (record.schema or {}).get("attributes") or []
    lines = []
    if attributes:
        head = ("attribute (declared)", "values", "may be unknown")
        lines = table(
            head,
            [
                (a["name"], ", ".join(map(str, a["values"])), "yes" if a.get("unknown") else "no")
                for a in attributes
            ],
        )
        lines.append("")
    if record.constraint is None:
        return [*lines, "No constraint: nothing was done to make groups equal."]
    alpha = "" if record.tolerance is None else f" (α = {record.tolerance:g})"
    words = f"Compared by the constraint {record.constraint}{alpha}: {', '.join(record.groups)}."
    return [*lines, plain(words, 2000)]


def _training(record: RunRecord) -> list[tuple[str, str]]:
    s = record.settings
    clip = s.get("clip") or {}
    bounds = ", ".join(f"{n} {v:g}" for n, v in clip.items() if isinstance(v, int | float))
    course = bound_course(record)
    if course is not None:
        aim = "" if course.target is None else f" so that {course.target:.3g} of users are clipped"
        bounds += f" (the first adapts{aim}; in the last round it was {course.bounds[-1]:.3g})"
    rate = s.get("learning_rate")
    optimizer = (s.get("optimizer") or {}).get("kind", "SGD")
    return [
        ("method", method_name(record)),
        ("constraint", record.constraint or "none"),
        ("tolerance α", "none" if record.tolerance is None else f"{record.tolerance:g}"),
        ("parameters of the model", _count(record.parameters)),
        ("users in a round", _count(s.get("cohort"))),
        ("rounds", f"{len(record.history):,} of {record.rounds:,}"),
        ("optimiser", f"{optimizer}{'' if rate is None else f', learning rate {rate:.4g}'}"),
        ("clip bounds", bounds or "none"),
        ("model kept", record.selected or NOT_SAID),
    ]


def _results(record: RunRecord) -> list[str]:
    lines: list[str] = []
    for kind in ("private", "test", "training"):
        evaluation = record.evaluations.get(kind)
        lines += [] if evaluation is None else [*_evaluated(evaluation), ""]
    if not lines:
        lines = [
            "The finished model was not evaluated, or its evaluation is not in the folder.",
            "",
        ]
    for words in against_lines(record):
        lines += [plain(words, 4000), ""]
    for found in record.against.values():
        # Differences have signs; brackets of intervals are no links, and need no escape.
        rows = [[plain(row[0]), *row[1:]] for row in against_rows(found)]
        lines += [*table(AGAINST_HEAD, []), *(f"| {' | '.join(row)} |" for row in rows), ""]
    last = record.history[-1] if record.history else {}
    if last:
        averaged = last.get("averaged_gap")
        gap, word = (last.get("gap"), "gap") if averaged is None else (averaged, "averaged gap")
        rates = " and ".join(record.rates)
        gaps = f", {word} ({plain(rates)}) {number(gap)}" if rates else ""
        noise = "with noise" if record.privacy is not None else "without noise"
        lines.append(
            f"Released in the last round of training (round {last['round']:,}; its cohort's, "
            f"{noise}): {score_word(record)} {number(last.get('accuracy'))}{gaps}."
        )
        said = [*trained_lines(record), *levelled_lines(record)]
        lines += [part for words in said for part in ("", plain(words, 2000))]
        moved = windows(record)
        if moved is not None:
            lines += ["", *(plain(words, 2000) for words in window_lines(moved)), ""]
            lines += table(WINDOW_HEAD, window_rows(moved))
    return lines


def _evaluated(e: Evaluated) -> list[str]:
    samples = "" if e.samples is None else f"{e.samples:,} samples of "
    lines = [
        f"### {plain(e.title)} ({plain(source_mark(e))})",
        "",
        f"{samples}{e.users:,} users; intervals at {percent(e.confidence)}. "
        f"{plain(e.score_name)} {with_interval(e.score)}.",
        *balance_lines(e),
    ]
    shares = [
        f"{plain(name)} {labels} of the labels, {own} of the predictions"
        for name, labels, own in balance_rows(e)
    ]
    lines += [f"Classes: {'; '.join(shares)}."] if shares else []
    for gap in e.tabled:
        # Differences have signs; brackets of intervals are no links, and need no escape.
        head = ("group", "rate", "value", "overall − value", "n'")
        rows = [
            (plain(r.group), plain(r.rate), with_interval(r.value),
             with_interval(r.difference, sign=True), "–" if r.count is None else f"{r.count:,.0f}")
            for r in gap.rows
        ]  # fmt: skip
        lines += ["", *table(head, []), *(f"| {' | '.join(row)} |" for row in rows), ""]
        worst = "" if gap.worst_group is None else f", the worst being {gap.worst_group}"
        what = e.constraint if gap.name == "constraint" else rates_of(gap)
        lines.append(f"Gap ({plain(what)}): {with_interval(gap.value)}{plain(worst)}.")
        pair = gap.worst_pair
        if pair is not None:
            lines.append(
                f"Furthest apart: {plain(pair.larger)} and {plain(pair.smaller)}, by "
                f"{with_interval(pair.difference)} in {plain(pair.rate)}."
            )
    if e.verdict_in_words is not None:
        lines += ["", f"Verdict: **{plain(e.verdict_in_words, 2000)}**"]
    elif e.collapsed is not None:
        lines += ["", f"**Collapsed: {plain(e.collapsed, 2000)}**"]
    if e.statement:
        lines += ["", *bullets(e.statement)]
    return lines


def _limits(record: RunRecord) -> list[str]:
    points: list[str] = []
    judged = judged_by(record)
    if record.constraint is not None and judged is None:
        points.append(
            "Whether the constraint holds was not judged on people who were not trained on."
        )
    if judged is not None:
        points.append(f"The verdict rests on: {verdict_on(judged)}.")
        points += _unsure(judged)
    simulated = [e.title for e in record.evaluations.values() if not e.released]
    if simulated:
        points.append(
            f"{' and '.join(simulated)}: {SIMULATION_ONLY}. These figures were measured without "
            "noise, and no ε covers showing them."
        )
    unknown = [
        str(a["name"]) for a in (record.schema or {}).get("attributes") or [] if a.get("unknown")
    ]
    if unknown:
        points.append(
            f"Who has no known value of {', '.join(unknown)} counts in the whole and is compared "
            "with nobody."
        )
    points += [f"Of the run: {_without_folder(w, record)}." for w in record.warnings]
    points += (
        [f"Stopped early: {_without_folder(record.stopped, record)}."] if record.stopped else []
    )
    points += [_without_folder(note, record) for note in record.notes]
    return [*points, *(_UNCOVERED if record.privacy is not None else _UNCOVERED[1:])]


def _unsure(e: Evaluated) -> Iterable[str]:
    gap = e.main
    if gap is None:
        return
    silent = [r.group for r in gap.rows if r.value.value is None]
    if silent:
        yield f"Not judged, having no sample or too much noise: {', '.join(dict.fromkeys(silent))}."
    if gap.value.low is not None and gap.value.high is not None:
        yield (
            f"The gap is known to lie in {with_interval(gap.value).split(' ', 1)[-1]}, not more "
            "exactly; smaller groups are known less well."
        )


def _provenance(record: RunRecord) -> list[str]:
    lines = [when_and_with(record)]
    packages: dict[str, Any] = (record.environment or {}).get("packages") or {}
    rest = [f"{n} {v}" for n, v in packages.items() if n not in ("fpfl", "torch")]
    lines += [f"Further packages: {', '.join(rest)}."] if rest else []
    if record.charged is not None:
        from fpfl.runs.folder import read_manifest

        lines.append(f"Run {read_manifest(record.folder).run}; {record.charged:,} rounds charged.")
    lines.append("This card was written by fpfl from the run's own files.")
    return lines


def _without_folder(text: str, record: RunRecord) -> str:
    """A sentence without the path of the run's folder, which says where somebody keeps things."""
    for path in {str(record.folder.resolve()), str(record.folder)} - {str(IN_MEMORY), "."}:
        text = text.replace(path, "the run's folder")
    return text.rstrip(".")


def _count(number: Any) -> str:
    return NOT_SAID if number is None else f"{number:,}"
