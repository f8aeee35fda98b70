"""Against a reference: who is better and who is worse off, and how sure that is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_population

import fpfl
from fpfl.aggregation import SeededNoise
from fpfl.fairness.against import Against, compare_predictions
from fpfl.fairness.evaluation import MARK
from fpfl.heldout import evaluate_with_reference
from fpfl.runs.folder import OpenRun

SEX = fpfl.Attribute("sex", ("F", "M"))
CONSTRAINT = fpfl.fnr_parity("sex")


def people(n: int, fnr: dict[str, tuple[float, float]], seed: int, shared: bool = True):
    """Positives whose models miss a given share of each group, and the same ones where shared."""
    rng = np.random.default_rng(seed)
    sex = np.repeat([0, 1], n)
    u, w = rng.random(2 * n), rng.random(2 * n)
    mine = np.array([fnr["FM"[s]][0] for s in sex])
    theirs = np.array([fnr["FM"[s]][1] for s in sex])
    p, q = (u >= mine).astype(int), ((u if shared else w) >= theirs).astype(int)
    return [torch.from_numpy(x) for x in (p, q, np.ones(2 * n, dtype=int), sex[:, None])]


def compared(*given, **more) -> Against:
    return compare_predictions(*given, [SEX], constraint=CONSTRAINT, **more)


def test_levelling_down_is_named_and_its_undoing_is_not() -> None:
    down = compared(*people(2000, {"F": (0.30, 0.30), "M": (0.30, 0.10)}, 0))
    assert [c.outcome for c in down.groups] == ["cannot tell", "worse"]
    assert down.levelled_down
    assert down.in_words[0].startswith("LEVELLED DOWN: worse off than")
    assert down.in_words[1].startswith("Worse off than without the constraint: sex=M (FNR 0.")
    helped = compared(*people(2000, {"F": (0.15, 0.30), "M": (0.15, 0.10)}, 0))
    assert [c.outcome for c in helped.groups] == ["better", "worse"]
    assert not helped.levelled_down
    assert helped.warning is None
    same = people(2000, {"F": (0.3, 0.3), "M": (0.1, 0.1)}, 0)
    assert {c.outcome for c in compared(*same).changes} == {"cannot tell"}


def test_intervals_hold_all_at_once_and_pairs_are_narrower() -> None:
    rates = {"F": (0.20, 0.25), "M": (0.12, 0.08)}
    covered = 0
    for seed in range(100):
        found = compared(*people(300, rates, seed, shared=False), bootstrap=200, seed=seed)
        truth = {"sex=F": -0.05, "sex=M": 0.04, "overall": -0.005}
        covered += all(c.low <= truth[c.group] <= c.high for c in found.changes)
    assert covered >= 90
    paired, apart = (
        compared(*people(2000, rates, 1, shared=shared)).groups[0] for shared in (True, False)
    )
    assert paired.high - paired.low < apart.high - apart.low


def test_a_group_without_samples_is_not_known() -> None:
    p, q, y, a = people(50, {"F": (0.3, 0.3), "M": (0.3, 0.1)}, 0)
    found = compared(p, q, y, torch.zeros_like(a))
    assert found.groups[1].outcome == "cannot tell"
    assert math.isnan(found.groups[1].value)
    assert any("sex=M (FNR: not known)" in line for line in found.in_words)
    # NaN is null in a file, and back.
    kept = json.loads(json.dumps(found.as_dict()))
    assert kept["mark"] == MARK
    assert Against.from_dict(kept).as_dict() == kept


def test_hits_count_the_other_way_round() -> None:
    p, q, y, a = people(2000, {"F": (0.3, 0.1), "M": (0.1, 0.1)}, 0)
    found = compare_predictions(p, q, y, a, [SEX], constraint=fpfl.accuracy_parity("sex"))
    assert [(c.rate, c.outcome) for c in found.groups] == [
        ("accuracy", "worse"), ("accuracy", "cannot tell"),
    ]  # fmt: skip
    found = compare_predictions(p, q, y, a, [SEX], constraint=fpfl.demographic_parity("sex"))
    assert found.groups[0].outcome == "less"
    assert found.levelled_down  # by accuracy


def test_private_comparisons_hold_all_at_once() -> None:
    from fpfl.heldout.against import compare_private, epsilon_of_each
    from fpfl.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier

    each = epsilon_of_each(1.0, 1e-5)
    sigma = gaussian_noise_multiplier(each, 1, 1e-5)
    assert gaussian_epsilon(sigma, 2, 1e-5) == pytest.approx(1.0, rel=1e-6)

    rng = np.random.default_rng(3)
    covered, widths = 0, []
    for _ in range(30):
        n = 3000
        sex, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
        features = np.stack([rng.random(n), sex, y], axis=1).astype(np.float32)
        schema = fpfl.Schema(shape=(3,), attributes=(SEX,), samples_per_user=1.0, population=n)
        data = fpfl.FederatedDataset.from_samples(
            torch.from_numpy(features), torch.from_numpy(y), torch.from_numpy(sex[:, None]), schema,
            np.arange(n),
        )  # fmt: skip
        one, other = (
            fpfl.evaluate_privately(
                Misses(share), data, constraint=CONSTRAINT, epsilon=2.0, bound=1.0
            )
            for share in ((0.3, 0.3), (0.3, 0.1))
        )
        found = compare_private(one, other, schema, CONSTRAINT)
        truth = {"overall": 0.1, "sex=F": 0.0, "sex=M": 0.2}
        covered += all(c.low <= truth[c.group] <= c.high for c in found.changes)
        widths.append(found.groups[1].low > 0.0)
        assert found.epsilon > 2.0
    assert covered == 30
    assert all(widths)


@pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
def test_a_seed_gives_the_two_releases_different_noise(tmp_path: Path) -> None:
    """With the same noise their difference, the very thing that is compared, would have none."""
    data = make_population(users=60)
    network = fpfl.mlp(5, seed=0)
    runs = [tmp_path / "run", tmp_path / "reference"]
    for folder in runs:  # twice the same model
        fpfl.train(network, data, cohort=20, rounds=2, seed=1, folder=folder)
    one, other, found = evaluate_with_reference(
        *map(OpenRun, runs), data, model=network, constraint=fpfl.fnr_parity("sex"), epsilon=2.0,
        bound=3.0, noise=SeededNoise(7),
    )  # fmt: skip
    assert one.seeded
    assert other.seeded
    assert one.released["sex=Female"] != other.released["sex=Female"]
    assert one.scores != other.scores
    assert any(change.value != change.reference for change in found.changes)


class Misses(torch.nn.Module):
    """Says no to a given share of each group."""

    def __init__(self, share: tuple[float, float]) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(share))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, 0] - self.share[x[:, 1].long().clamp(0, 1)]).unsqueeze(1)
