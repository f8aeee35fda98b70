"""K is declared or counted, and the statement says which; add-remove needs it declared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fpfl
from fpfl.privacy.sampling import PoissonSampling
from fpfl.training.spec import chosen_sampling

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore::UserWarning")


def people(users: int, declared: int | None) -> fpfl.FederatedDataset:
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(users), 2)
    x = rng.normal(size=(len(ids), 3)).astype(np.float32)
    schema = fpfl.Schema((3,), population=declared, samples_per_user=2.0)
    return fpfl.FederatedDataset.from_samples(x, (x[:, 0] > 0).astype(int), None, schema, ids)


def trained(data: fpfl.FederatedDataset, tmp: Path | None = None, **privacy) -> fpfl.Run:
    settings = {"noise_multiplier": 2.0, **privacy}
    return fpfl.train(
        fpfl.mlp(3, seed=0),
        data, cohort=20, rounds=3, privacy=fpfl.Privacy(**settings), folder=tmp,
    )  # fmt: skip


def test_add_remove_needs_a_declared_k() -> None:
    with pytest.raises(ValueError, match=r"K was counted.*Schema\(population=.*\[data.declared\]"):
        trained(people(50, None), neighbours="add-remove")
    run = trained(people(50, 60), neighbours="add-remove")
    assert "K is a declared number; who they are is not taken as public" in str(run.privacy)
    counted = trained(people(50, None))
    assert "K was counted from the data" in str(counted.privacy)
    assert counted.privacy.population_declared is False
    assert "K is a declared number." in str(trained(people(50, 50)).privacy)


@pytest.mark.parametrize("users", [40, 60, 80])
def test_nothing_that_is_shown_depends_on_how_many_there_are(users: int, tmp_path: Path) -> None:
    """Fewer than declared, as many, more: the same statement, settings and noise."""
    run = trained(people(users, 60), tmp_path / "run", neighbours="add-remove", epsilon=2.0,
                  noise_multiplier=None)  # fmt: skip
    same = trained(people(60, 60), neighbours="add-remove", epsilon=2.0, noise_multiplier=None)
    assert str(run.privacy) == str(same.privacy)
    assert run.privacy.as_dict() == same.privacy.as_dict()
    assert run.settings == same.settings
    public = [path for path in (tmp_path / "run").glob("*.json") if "fingerprints" not in path.name]
    assert len(public) > 3
    if users != 60:
        texts = "".join(path.read_text(encoding="utf-8") for path in public)
        assert f'"population": {users}' not in texts


def test_every_user_is_drawn_with_the_declared_chance() -> None:
    """More users than declared push nobody out."""
    data = people(90, 60)
    sampling = chosen_sampling(None, None, data, 20)
    assert sampling == PoissonSampling(60, 20, listed=90)
    rng = np.random.default_rng(1)
    times = np.bincount(np.concatenate([sampling.draw(rng) for _ in range(3000)]), minlength=90)
    assert len(times) == 90
    # 1/3 each, five standard deviations of a mean of 3,000 draws.
    assert np.abs(times / 3000 - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 3000)


def test_cohorts_of_a_fixed_size_need_the_right_number() -> None:
    with pytest.raises(ValueError, match="there are 90 users, and the schema declares 60"):
        trained(people(90, 60), convention="replace-one")


def test_declaring_afterwards() -> None:
    data = people(50, None)
    for k, listed in ((40, 50), (50, 50), (70, 70)):
        found = data.declared(k)
        assert (found.K, found.population, len(found)) == (k, listed, len(data))
        assert int(found.sizes().sum()) == len(data)
    dealt = data.partition(mean=2, seed=0, population=33)
    assert (dealt.K, dealt.population) == (33, 33)
    assert dealt.schema.population == 33
    assert data.partition(mean=2, seed=0).schema.population is None
    with pytest.raises(ValueError, match="population is 0"):
        data.partition(population=0)
    with pytest.raises(ValueError, match="those without samples are users, too"):
        replace(data, schema=replace(data.schema, population=51))


def test_a_user_beyond_the_declared_number_can_withdraw(tmp_path: Path) -> None:
    from fpfl.runs.journal import read_withdrawals, withdraw

    run = tmp_path / "run"
    trained(people(80, 60), run, neighbours="add-remove")
    withdraw(run, [75])
    assert read_withdrawals(run / "withdrawals.txt") == {75}
    again = fpfl.RunFolder(run, resume=True)
    trained(people(80, 60), again, neighbours="add-remove")
