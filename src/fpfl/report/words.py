"""What was trained and what is promised, in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fpfl.fairness.against import NOT_MEASURED, Against, Change
from fpfl.fairness.confusion import balance_of, collapsed_in_training, training_verdict
from fpfl.fairness.levelling import weighed_down
from fpfl.fairness.metrics import Estimate
from fpfl.heldout.result import IN_DOUBT
from fpfl.methods.base import Unconstrained, about
from fpfl.privacy.assumptions import BEFORE
from fpfl.privacy.statement import round_up
from fpfl.report.evaluations import SIMULATION_ONLY, TITLES, Evaluated, Figure, Gap
from fpfl.report.reading import RunRecord
from fpfl.report.series import Windows
from fpfl.training.reference import together

_SELECTIONS = {
    "best": "the best round's model by released counts",
    "last": "the last model",
    "average": "the average of the models",
}


@dataclass(frozen=True)
class Banner:
    """Something about a run's privacy that must not be overlooked."""

    title: str
    text: str


def number(value: float | None, digits: int = 3) -> str:
    """A figure as it is shown; a dash where it is not known."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None) -> str:
    """A difference with its sign."""
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def interval(figure: Figure, sign: bool = False) -> str:
    """The ends of a figure's interval; nothing where they are not known."""
    if figure.low is None or figure.high is None:
        return ""
    show = signed if sign else number
    return f"[{show(figure.low)}, {show(figure.high)}]"


def with_interval(figure: Figure, sign: bool = False) -> str:
    """A figure and its interval."""
    value = signed(figure.value) if sign else number(figure.value)
    return f"{value} {interval(figure, sign)}".strip()


def rates_of(gap: Gap) -> str:
    """The rates that a gap is of, as "FNR and FPR"."""
    return " and ".join(dict.fromkeys(row.rate for row in gap.rows))


def gap_name(gap: Gap) -> str:
    """A gap with its rates: "gap (FNR and FPR)"."""
    return f"gap ({rates_of(gap)})"


def percent(confidence: float) -> str:
    """A confidence, as 95%."""
    return f"{100 * confidence:.4g}%"


def is_regression(record: RunRecord) -> bool:
    """Whether numbers are predicted, as far as the folder says."""
    if record.schema is not None and "classes" in record.schema:
        return record.schema["classes"] is None
    return any(e.score_name == "absolute error" for e in record.evaluations.values())


def score_word(record: RunRecord) -> str:
    """What the released score of a round is called."""
    return "1 − squared error" if is_regression(record) else "accuracy"


def what_was_trained(record: RunRecord) -> list[str]:
    """The run in a few sentences."""
    s, said = record.settings, record.privacy or {}
    sentences = [f"A model{_size(record)} for {_task(record)}, trained on {_people(record)}."]
    T, done = record.rounds, len(record.history)
    rounds = f"{T:,} rounds" if done in (0, T) else f"{done:,} of {T:,} planned rounds"
    cohort = f" with {s['cohort']:,} users in each" if s.get("cohort") else ""
    poisson = s.get("sampling") == "PoissonSampling" or said.get("convention") in (
        "poisson", "coins",
    )  # fmt: skip
    sentences.append(f"{rounds}{cohort}{' on average' if cohort and poisson else ''}.")
    sentences.append(_constraint(record))
    if record.inputs is not None:
        sentences.append(f"The model scales its inputs itself: {record.inputs}.")
    if record.selected:
        sentences.append(f"Model kept: {record.selected}.")
    elif s.get("selection"):
        kept = _SELECTIONS.get(str(s["selection"]), str(s["selection"]))
        sentences.append(f"Model to be kept at the end: {kept}.")
    if record.stopped:
        sentences.append(f"Stopped early: {record.stopped}.")
    return sentences


def _size(record: RunRecord) -> str:
    return "" if record.parameters is None else f" with {record.parameters:,} parameters"


def _task(record: RunRecord) -> str:
    schema = record.schema or {}
    if isinstance(schema.get("classes"), int):
        named = class_words(schema)
        return f"{schema['classes']} classes" + (f" ({named})" if named else "")
    return "a regression" if is_regression(record) else "classification"


def class_words(schema: Mapping[str, Any], shown: int = 20) -> str:
    """Which class is which, and which of two is the positive one; empty where nobody said."""
    names = schema.get("class_names")
    if not isinstance(names, list | tuple):
        return ""
    said = [f"{i} = {name}" for i, name in enumerate(names)]
    if len(said) == 2:
        said[1] += ", the positive one"
    return "; ".join([*said[:shown], *([f"and {len(said) - shown} more"] if said[shown:] else [])])


def _people(record: RunRecord) -> str:
    K = record.settings.get("population")
    people = "a population" if K is None else f"a population of {K:,} users"
    if record.settings.get("sampling") == "federation":
        nodes = record.settings.get("nodes")
        return f"{people} in a federation" + (f" of {nodes:,} nodes" if nodes else "")
    return people


def _constraint(record: RunRecord) -> str:
    if record.constraint is None:
        return "No fairness constraint was asked for."
    groups, rates = record.groups, record.rates
    method = method_name(record)
    alpha = "" if record.tolerance is None else f", tolerance α = {record.tolerance:g}"
    return (
        f"Constraint: {record.constraint}{alpha}; {' and '.join(rates)} of {len(groups)} groups "
        f"({', '.join(groups)}) may differ from the whole's by α at most. Method: {method}."
    )


def method_name(record: RunRecord) -> str:
    """The method in words."""
    method = record.settings.get("method")
    kind = method.get("kind") if isinstance(method, dict) else method
    if kind == Unconstrained.__name__:
        return "plain federated learning, no constraint"
    return about(str(kind)) or str(kind)


def when_and_with(record: RunRecord) -> str:
    """Date and versions, as far as the folder has them."""
    parts = []
    if record.begun:
        parts.append(f"Begun {_day(record.begun)}")
    if record.ended:
        parts.append(f"ended {_day(record.ended)}")
    packages = (record.environment or {}).get("packages") or {}
    names = [f"{n} {v}" for n, v in packages.items() if n in ("fpfl", "torch")]
    if names:
        parts.append(f"computed with {', '.join(names)}")
    if not parts:
        return "The folder does not say when it was made, nor with which versions."
    return f"{', '.join(parts)}."


def _day(time: str) -> str:
    return time[:16].replace("T", " ") + " UTC"


def headline(record: RunRecord) -> str:
    """ε, δ and against whom, in a line."""
    said = record.privacy
    if said is None:
        return "No privacy guarantee."
    if record.epsilon is None:
        return (
            f"ε was not computed where the run was made (dp-accounting was missing); "
            f"δ = {said['delta']:g}."
        )
    return (
        f"ε = {round_up(record.epsilon)} at δ = {said['delta']:g}, for all samples of one user, "
        f"against those who see only what is released{_server(said)}."
    )


def _server(said: dict[str, Any]) -> str:
    aggregation = said.get("aggregation")
    if aggregation is not None and not aggregation.get("shares"):
        return "; no guarantee against the server"
    server = said["epsilon_server"]
    if said.get("epsilon_server_real") is not None:
        server = said["epsilon_server_real"]
    if said["convention"] == "coins":
        return ", the server included"
    return f"; ε = {round_up(server)} against a server that knows the cohorts"


def banners(record: RunRecord) -> list[Banner]:
    """What takes the promise away, or makes it another one."""
    found = []
    said = record.privacy
    if said is None:
        found.append(
            Banner(
                "No privacy",
                "This run gives no privacy guarantee: its totals and its model have no noise, and "
                "whatever is shown of them may say something about single users.",
            )
        )
        return found
    if said.get("contributions") is None:
        what, because = BEFORE.split(": ", 1)
        found.append(Banner(what, because))
    if record.injected:
        found.append(
            Banner(
                "NOT PRIVATE",
                "Coins and noise came from a test generator: whoever has its seed can take the "
                "noise off. All privacy figures are those of a run without it.",
            )
        )
    elif record.seeded_noise:
        found.append(
            Banner(
                "Seeded noise: a simulation",
                "There is no guarantee against anyone who has the seed and can subtract the noise. "
                "All privacy figures are those of a run whose noise nobody knows.",
            )
        )
    if said["real_population"] is not None:
        found.append(
            Banner(
                "Hypothetical population",
                f"Noise was chosen for {said['population']:,} users; the run draws from "
                f"{said['real_population']:,}. ε on this page is that of the real ones.",
            )
        )
    return found


def collapses(record: RunRecord) -> list[Banner]:
    """Evaluations in which the model has collapsed: all other figures of it mean little."""
    row = record.history[-1] if record.history else {}
    said = collapsed_in_training(row, class_names(record))
    trained = []
    if said is not None:
        text = f"{said[:1].upper()}{said[1:]}. No gap or verdict of it says that it is fair."
        trained.append(Banner("Collapsed while training", text))
    return trained + [
        Banner(
            "Collapsed model",
            f"{e.title} ({source_mark(e)}): {e.collapsed}. It treats groups alike for nothing, and "
            "no gap or verdict of it says that it is fair.",
        )
        for e in record.evaluations.values()
        if e.collapsed is not None
    ]


def class_names(record: RunRecord) -> tuple[str, ...] | None:
    """What the classes are called, where it is declared."""
    names = (record.schema or {}).get("class_names")
    return tuple(map(str, names)) if isinstance(names, list | tuple) else None


def trained_lines(record: RunRecord) -> list[str]:
    """What the last rounds' released tables say of balance, in sentences; empty without tables."""
    said = training_verdict(record.history, class_names(record))
    if said is None:
        return []
    row = record.history[-1]
    found, metrics = row["balance"], balance_of(row, class_names(record))
    assert metrics is not None  # of it was spoken
    shares = ", ".join(
        f"{metrics.named(k)} {number(p.value)} (of labels {number(n.value)})"
        for k, (p, n) in enumerate(zip(metrics.predicted, metrics.labels, strict=True))
    )
    window = "the last round" if found["rounds"] == 1 else f"the last {found['rounds']:,} rounds"
    return [
        said,
        f"Over {window}, as released: balanced accuracy "
        f"{number(metrics.balanced_accuracy.value)}, F1 {number(metrics.f1.value)}; predicted: "
        f"{shares}.",
    ]


def levelled_lines(record: RunRecord) -> list[str]:
    """When and how far strong groups were weighed down; empty without a constraint."""
    said = weighed_down(record.history, record.settings)
    return [] if said is None else [said]


def window_lines(found: Windows) -> list[str]:
    """What the two windows are, in sentences."""
    (a, b), (c, d) = found.early, found.last
    return [
        f"Each group's released rates in rounds {a:,} to {b:,}, before the multipliers acted much, "
        f"and in rounds {c:,} to {d:,}, the last; ± is the standard error from the noise alone, "
        "without that of drawing cohorts. An early model is hardly trained: this says how rates "
        "have moved, not what they would be without the constraint."
    ]


def window_rows(found: Windows) -> list[tuple[str, ...]]:
    """Every group's rates in the two windows."""
    return [
        (
            f"{r.group}, {r.rate}",
            _with_noise(r.early, r.early_noise),
            _with_noise(r.last, r.last_noise),
        )
        for r in found.rows
    ]


WINDOW_HEAD = ("group, rate", "early", "last")


def _with_noise(value: float | None, noise: float | None) -> str:
    return number(value) if value is None or noise is None else f"{number(value)} ± {number(noise)}"


def against_lines(record: RunRecord) -> list[str]:
    """Who is better and who is worse off than without the constraint; or that nobody knows."""
    if record.constraint is None:
        return []
    if record.reference is None and not record.against:
        return [NOT_MEASURED]
    lines = []
    if not record.against:
        lines.append(
            "Against training without the constraint: not measured. There is a reference, and no "
            "evaluation of both on the same users (fpfl evaluate)."
        )
    for kind, found in record.against.items():
        where = TITLES[kind] + ("" if kind == "private" else f", {SIMULATION_ONLY}")
        lines.append(
            f"Against training without the constraint ({where}; {found.users:,} users, intervals "
            f"at {percent(found.confidence)}, all at once): {' '.join(found.in_words)}"
        )
        lines += [] if found.price is None else [found.price]
    said = together([record.privacy, (record.reference or {}).get("privacy")])
    return [*lines, *([said] if said is not None and record.reference is not None else [])]


def against_rows(found: Against) -> list[tuple[str, ...]]:
    """Every group's rates with the constraint and without, the difference, and what is sure."""
    return [
        (
            f"{'everybody' if c.group == 'overall' else c.group}, {c.rate}",
            *(number(_or_none(value)) for value in (c.value, c.reference)),
            with_interval(_difference(c), sign=True),
            c.outcome,
        )
        for c in found.changes
    ]


AGAINST_HEAD = (
    "group, rate",
    "with the constraint",
    "without",
    "difference",
    "better or worse off",
)


def _difference(change: Change) -> Figure:
    return Figure(*(_or_none(x) for x in (change.difference, change.low, change.high)))


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def balance_lines(evaluation: Evaluated) -> list[str]:
    """What accuracy does not say, in sentences; nothing where it is not known."""
    m = evaluation.metrics
    if m is None:
        return []
    figures = {"Balanced accuracy": m.balanced_accuracy, "F1": m.f1, "AUC": m.auc}
    said = ", ".join(f"{n} {_estimate(e)}" for n, e in figures.items() if e is not None)
    lines = [f"{said}."]
    if m.unbalanced:
        lines.append(
            "Classes are not equally frequent: a model that always says the same has a high "
            "accuracy. Read the balanced accuracy."
        )
    if evaluation.collapse_in_doubt:
        lines.append(IN_DOUBT)
    return lines


def balance_rows(evaluation: Evaluated, most: int = 20) -> list[tuple[str, str, str]]:
    """The share of each class among labels and among predictions."""
    m = evaluation.metrics
    if m is None:
        return []
    pairs = zip(m.labels, m.predicted, strict=True)
    return [
        (m.named(k).strip("'"), _estimate(labels), _estimate(predicted))
        for k, (labels, predicted) in enumerate(pairs)
    ][:most]


def _estimate(e: Estimate) -> str:
    ends = [None if math.isnan(end) else end for end in (e.value, e.low, e.high)]
    return with_interval(Figure(*ends))


def marks(record: RunRecord) -> list[str]:
    """What to know of a run beside its figures, in a word or two each."""
    words = []
    if record.privacy is None:
        words.append("no privacy")
    elif record.injected:
        words.append("NOT PRIVATE")
    elif record.seeded_noise:
        words.append("seeded noise")
    if record.privacy is not None and record.privacy.get("contributions") is None:
        words.append("ε not established")
    if record.seeded_cohorts:
        words.append("seeded cohorts")
    if record.privacy is not None and record.privacy["real_population"] is not None:
        words.append("hypothetical population")
    if not record.finished:
        words.append("unfinished")
    if record.stopped:
        words.append("stopped early")
    if collapses(record):
        words.append("COLLAPSED")
    return words


def epsilon_words(record: RunRecord) -> str:
    """ε in a table's cell."""
    if record.privacy is None:
        return "none"
    return "not computed" if record.epsilon is None else round_up(record.epsilon)


def source_mark(evaluation: Evaluated) -> str:
    """How an evaluation's figures came about."""
    if not evaluation.released:
        return SIMULATION_ONLY
    cost = f"released, ε = {round_up(evaluation.epsilon or 0.0)}"
    if not evaluation.established:
        cost += ", not established"
    return f"{cost}, seeded noise: a simulation" if evaluation.seeded else cost
