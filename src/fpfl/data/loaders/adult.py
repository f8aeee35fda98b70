"""Adult, dealt to made-up users: `fpfl.load_adult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fpfl.data.adult import RANGES, load_adult
from fpfl.data.federated import FederatedDataset
from fpfl.data.loaders import Range, loader


def _ranges(settings: Mapping[str, Any]) -> Mapping[str, Range]:
    return RANGES if settings.get("normalise", "ranges") == "ranges" else {}


@loader("adult", ranges=_ranges)
def adult(
    *,
    seed: int | None,
    normalise: Literal["paper", "ranges"] = "ranges",
    attributes: list[Literal["sex", "race"]] | None = None,
    users: Literal["poisson", "single"] = "poisson",
    mean_samples: float = 2.0,
) -> tuple[FederatedDataset, FederatedDataset]:
    """Training users with so many samples on average, or one each; and the test set."""
    by = ("sex",) if attributes is None else tuple(attributes)
    people = load_adult("train", normalise=normalise, attributes=by)
    if users == "poisson":
        people = people.partition(mean=mean_samples, seed=seed)
    return people, load_adult("test", normalise=normalise, attributes=by)
