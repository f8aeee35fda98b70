r"""Collapsed models, named in words: those that have stopped telling classes apart.

A model that says "no" to everybody has the accuracy of the share of "no", and every error rate of
it is the same in all groups: good and fair by its figures, and of no use to anybody. A model is
called collapsed where a class k is hardly ever predicted, or where it is right about the classes no
more often than a model that always says the same:

    predicted_k < 1% and predicted_k < labels_k/4,   or   balanced accuracy ≤ 1/C + 0.02

for C classes that occur among the labels: 0.52 with two. The quarter is for rare classes: a model
that finds nearly all of one person in two hundred has not collapsed.
"""

from __future__ import annotations

from fpfl.fairness.metrics import ClassMetrics

LEAST = 0.01
"""A class that is predicted for a smaller share is hardly ever predicted."""

QUARTER = 0.25
"""...unless that is this much of its own share among the labels."""

ABOVE_CHANCE = 0.02
"""What a model's balanced accuracy must have over 1/C."""


def collapse_in_words(
    metrics: ClassMetrics | None, accuracy: float | None, *, people: bool = False
) -> str | None:
    """How a model has collapsed, in words; None where it has not, or where it is not known.

    Parameters
    ----------
    metrics
        Of the model, without noise; None for a regression, or in files of earlier versions.
    accuracy
        The model's.
    people
        Whether samples are people: each user has one.
    """
    if metrics is None or accuracy is None:
        return None
    labels = [each.value for each in metrics.labels]
    predicted = [each.value for each in metrics.predicted]
    there = [k for k, share in enumerate(labels) if share > 0.0]
    if len(there) < 2:
        return None  # whoever has one class to tell apart cannot be wrong about it
    often = max(range(len(labels)), key=lambda k: predicted[k])
    most = max(there, key=lambda k: labels[k])
    missed = [k for k in there if predicted[k] < min(LEAST, QUARTER * labels[k])]
    always = _always(accuracy, labels[often], metrics.named(often))
    whom = "people" if people else "samples"
    if missed and predicted[often] > 1.0 - LEAST:
        others = 1.0 - predicted[often]
        who = "everybody" if people else "every sample"
        rest = who if others <= 0.0 else f"all but {_percent(others)} of {whom}"
        return f"the model predicts {metrics.named(often)} for {rest}: {always}"
    if missed:
        said = ", nor ".join(
            f"{metrics.named(k)}, for {_percent(predicted[k])} of {whom} "
            f"({_percent(labels[k])} of them are)"
            for k in missed
        )
        return f"the model hardly ever predicts {said}: accuracy {accuracy:.3f}"
    balanced = metrics.balanced_accuracy.value
    if balanced <= 1 / len(there) + ABOVE_CHANCE:
        return (
            "the model tells the classes apart no better than chance: balanced accuracy "
            f"{balanced:.3f} and accuracy {accuracy:.3f}, where always saying "
            f"{metrics.named(most)} has {1 / len(there):.3f} and {labels[most]:.3f}"
        )
    return None


def clearly_collapsed(metrics: ClassMetrics | None) -> bool | None:
    """Whether the intervals of released figures leave no doubt of a collapse, or of none.

    True where all that the intervals allow has collapsed, False where none of it has, and None
    where one cannot tell, or where there are no figures.
    """
    if metrics is None:
        return None
    pairs = list(zip(metrics.labels, metrics.predicted, strict=True))
    chance = 1 / len(pairs) + ABOVE_CHANCE
    balanced = metrics.balanced_accuracy
    if balanced.high <= chance or any(
        own.high < min(LEAST, QUARTER * labels.low) for labels, own in pairs
    ):
        return True
    found = all(own.low >= min(LEAST, QUARTER * labels.high) for labels, own in pairs)
    return False if found and balanced.low > chance else None


def _always(accuracy: float, share: float, name: str) -> str:
    if f"{accuracy:.3f}" == f"{share:.3f}":
        return f"accuracy {accuracy:.3f} is that of always saying {name}"
    return f"accuracy {accuracy:.3f}, where always saying {name} has {share:.3f}"


def _percent(share: float) -> str:
    """0.3%, 12%; 0.004% rather than 0.0%."""
    return f"{100 * share:.2g}%" if share < LEAST or share >= 0.1 else f"{100 * share:.1f}%"
