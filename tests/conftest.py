"""What the tests share: which of them run, in which order; small made-up populations; commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fpfl import Attribute, FederatedDataset, Schema
from fpfl.users import CohortEngine

# Tests marked `release`, and the large numbers of `thorough`, are for `make release-check`, which
# sets FPFL_RELEASE.
RELEASE = bool(os.environ.get("FPFL_RELEASE"))

# A file is one worker's, and the files are dealt out in this order: with the long ones first, what
# is dealt out last is short, and no core waits long for the other.
LONGEST = (
    "test_flower.py",
    "test_fuzz.py",
    "test_folder.py",
    "test_docs.py",
    "test_sweeps.py",
    "test_federation.py",
    "test_ranks.py",
    "test_flower_apps.py",
    "test_audit.py",
    "test_femnist_files.py",
    "test_accounting.py",
    "test_report_browser.py",
    "test_onegradient.py",
    "test_estimator.py",
    "test_kill.py",
    "test_femnist.py",
    "test_cli.py",
)


def thorough(here: int, release: int) -> int:
    """How many examples, kills or rounds: few in ``make test``, more before a release."""
    return release if RELEASE else here


def some(names: Iterable[Any], *here: Any) -> list[Any]:
    """Parameters of a long test: those named run in ``make test``, all before a release."""
    all_of_them = list(names)
    assert set(here) <= set(all_of_them), here
    return [
        name if name in here else pytest.param(name, marks=pytest.mark.release)
        for name in all_of_them
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Property tests watch no clock: how fast an example is found and run is the machine's."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("fpfl", deadline=None, suppress_health_check=slow, print_blob=True)
    settings.load_profile("fpfl")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not RELEASE:
        long = [item for item in items if item.get_closest_marker("release")]
        items[:] = [item for item in items if not item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=long)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


SEX = Attribute("sex", ("Female", "Male"))
RACE = Attribute("race", ("A", "B", "C"), unknown=True)


def make_population(
    users: int = 30,
    mean: float = 3.0,
    features: int = 5,
    classes: int | None = 2,
    attributes: tuple[Attribute, ...] = (SEX,),
    seed: int = 0,
) -> FederatedDataset:
    """Users of Poisson sizes (some without samples) with features that predict the label."""
    rng = np.random.default_rng(seed)
    sizes = rng.poisson(mean, users)
    sizes[0] = max(sizes[0], 1)
    n = int(sizes.sum())
    x = rng.normal(size=(n, features))
    codes = (
        np.stack(
            [rng.integers(-1 if a.unknown else 0, len(a.values), n) for a in attributes], axis=1
        )
        if attributes
        else np.zeros((n, 0), dtype=np.int64)
    )
    signal = x @ rng.normal(size=features) + rng.normal(scale=0.5, size=n)
    if codes.shape[1]:
        signal = signal - 0.7 * (codes[:, 0] == 0)
    if classes is None:
        y = np.clip(signal, -5, 5)
    else:
        y = np.digitize(signal, np.quantile(signal, np.linspace(0, 1, classes + 1)[1:-1]))
    schema = Schema(
        shape=(features,),
        classes=classes,
        label_range=(-5.0, 5.0) if classes is None else None,
        attributes=attributes,
        samples_per_user=mean,
    )
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    return FederatedDataset(
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(y.astype(np.float32 if classes is None else np.int64)),
        torch.from_numpy(codes.astype(np.int64)),
        offsets,
        schema,
    )


@pytest.fixture
def fpfl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; its exit code, and what it wrote, warnings too."""
    from fpfl import FpflWarning, cli

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fpfl", *map(str, words)])
        with warnings.catch_warnings():
            warnings.simplefilter("always", FpflWarning)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def population() -> Callable[..., FederatedDataset]:
    return make_population


def vectors(engine: CohortEngine, w: Tensor, users: np.ndarray, **how: Any) -> Tensor:
    """The users' vectors, one row each in the given order; zero for users without samples."""
    rows = torch.zeros(len(users), engine.layout.size, dtype=w.dtype)
    place = {int(user): row for row, user in enumerate(users)}
    for part in engine.statistics(w, users, **how):
        rows[[place[int(user)] for user in part.users]] = part.dense().cpu()
    return rows
