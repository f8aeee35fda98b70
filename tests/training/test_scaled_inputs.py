"""Training finds out about its inputs once: within ε, charged before, kept, and in the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fpfl
from fpfl.aggregation.noise import SeededNoise
from fpfl.data import CategoryColumn, Label, NumberColumn
from fpfl.data.federated import FederatedDataset
from fpfl.data.inputs import ScaledModel, load_model
from fpfl.measurement.counting import STEP_BITS
from fpfl.measurement.inputs import exact_inputs, input_cells, input_sum
from fpfl.measurement.plan import MeasurementPlan
from fpfl.privacy import Block, PrivacyPlan
from fpfl.privacy.budget import PopulationLedger
from fpfl.privacy.filter import Mechanism
from fpfl.runs.folder import OpenRun, RunFolder
from fpfl.runs.ledger import RunLedger
from fpfl.server.simulation import Simulation
from fpfl.sweeps.batch import Job, trained

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning", "ignore:DP noise dominates")

USERS = 400
FEATURES = (
    NumberColumn("age", (0, 1000)),
    NumberColumn("score", (-100, 100), indicator=True),
    CategoryColumn("job", ("a", "b")),
)
SCHEMA = fpfl.TableSchema(
    label=Label("y", classes=("no", "yes")),
    features=FEATURES,
    user="id",
    population=USERS,
    samples_per_user=2,
)


RANKED = replace(
    SCHEMA,
    features=tuple(
        replace(each, transform="quantile") if isinstance(each, NumberColumn) else each
        for each in FEATURES
    ),
)


def rows(times: float = 1.0) -> str:
    rng = np.random.default_rng(0)
    lines = ["id,age,score,job,sex,y"]
    for user in range(USERS):
        for _ in range(1 + user % 3):
            age, score, job = rng.normal(40, 10), rng.normal(), rng.choice(["a", "a", "b", "c"])
            yes = age - 40 + 10 * score > rng.normal()
            shown = "" if rng.random() < 0.1 else f"{score:.3f}"
            said = "yes" if yes else "no"
            lines.append(f"{user},{age * times:.3f},{shown},{job},{'fm'[user % 2]},{said}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "people.csv"
    path.write_text(rows())
    return path


@pytest.fixture(scope="module")
def people(table: Path) -> FederatedDataset:
    return fpfl.read_table(table, SCHEMA)


@pytest.fixture(params=["people", "ranked"])
def either(request: pytest.FixtureRequest) -> FederatedDataset:
    """The same people, whose numbers become inputs in one way or the other."""
    data: FederatedDataset = request.getfixturevalue(request.param)
    return data


@pytest.fixture(scope="module")
def ranked(table: Path) -> FederatedDataset:
    return fpfl.read_table(table, RANKED)


PRIVATE = fpfl.Privacy(epsilon=4.0, clip=1.0)


def train(data: FederatedDataset, **options: Any) -> fpfl.Run:
    given = {"cohort": 40, "rounds": 6, "learning_rate": 0.1, "seed": 1} | options
    return fpfl.train(fpfl.mlp(data.schema.shape[0], (4,), seed=0), data, **given)


# --- accounting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "neighbours", "cap"),
    [
        ("poisson", "zero-out", None),
        ("poisson", "add-remove", 5),
        ("poisson", "replace-one", None),
        ("replace-one", None, None),
        ("paper", None, None),
    ],
)
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_measurement_and_rounds_are_within_one_budget(
    convention: str, neighbours: Any, cap: int | None, epsilon: float
) -> None:
    """Composed by the plan's accountant they cost ε at most, and the measurement 3% of it."""
    asked = fpfl.Privacy(
        epsilon, clip=1.0, convention=convention, neighbours=neighbours, max_participations=cap
    )
    plan = asked.plan(population=5000, cohort=250, rounds=200, measurement=True)
    assert plan.measurement is not None
    assert 0.999 * epsilon < plan.epsilon <= epsilon
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    alone = PrivacyPlan(**values | {"measurement": None})
    assert 0.97 * epsilon <= alone.epsilon < 0.99 * epsilon
    assert alone.epsilon_honest < plan.epsilon_honest
    assert alone.epsilon_server < plan.epsilon_server
    # What is composed is a release of its own: nobody gets it cheaper than by itself.
    release = Mechanism.measurement_of(plan)
    assert release is not None
    reach = plan.sensitivity_honest
    assert release == Mechanism("all", 5000, 5000, plan.measurement, plan.neighbours)
    own = fpfl.privacy.gaussian_epsilon(
        plan.measurement, 1, plan.delta, sensitivity=plan.sensitivity
    )
    assert 0.0 < own < epsilon / 3
    assert release.sensitivity == reach
    assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_with_everybody_in_every_round_it_is_one_gaussian_mechanism() -> None:
    """μ² = T/σ² + 1/σ₀²: the composition that is known exactly."""
    plan = PrivacyPlan(
        population=100,
        cohort=100,
        rounds=3,
        noise_multiplier=5.0,
        measurement=4.0,
        blocks=(Block("v", 1.0),),
    )
    mu = np.sqrt(3 / 25 + 1 / 16)
    assert plan.epsilon == pytest.approx(fpfl.privacy.gaussian_epsilon(1 / mu, 1, plan.delta))


def test_a_noise_multiplier_has_a_measurement_by_rule() -> None:
    """A twentieth of the rounds' own μ²: documented, and little of their ε."""
    asked = fpfl.Privacy(noise_multiplier=2.0, clip=1.0)
    sizes = {"population": 5000, "cohort": 250, "rounds": 200}
    plan, alone = asked.plan(**sizes, measurement=True), asked.plan(**sizes)
    mu2 = 0.05**2 * 200 * np.expm1(1 / 4.0)
    assert plan.measurement == pytest.approx(1 / np.sqrt(mu2 / 20))
    assert alone.epsilon < plan.epsilon < 1.04 * alone.epsilon
    assert plan.noise_multiplier == alone.noise_multiplier


def test_noise_that_was_calibrated_elsewhere_is_kept_both_of_it(people: FederatedDataset) -> None:
    """σ and σ₀ of one plan, in place of its ε: the same plan on a machine without an accountant."""
    sizes = {"population": 5000, "cohort": 250, "rounds": 200}
    asked = fpfl.Privacy(2.0, clip=1.0)
    plan = asked.plan(**sizes, measurement=True)
    told = replace(
        asked, epsilon=None, noise_multiplier=plan.noise_multiplier, measurement=plan.measurement
    )
    assert told.plan(**sizes, measurement=True) == plan
    assert told.plan(**sizes).measurement is None
    run = train(people, privacy=told, noise_seed=1)
    assert run.privacy is not None
    assert run.privacy.measurement == plan.measurement
    with pytest.raises(ValueError, match="a positive σ₀"):
        replace(asked, measurement=0.0)


@pytest.mark.parametrize(
    ("convention", "neighbours"),
    [("poisson", "zero-out"), ("poisson", "replace-one"), ("replace-one", None), ("paper", None)],
)
def test_a_measurement_that_costs_too_much_is_named_as_it_was_given(
    convention: str, neighbours: Any
) -> None:
    asked = fpfl.Privacy(0.2, convention=convention, neighbours=neighbours, measurement=3.0)
    with pytest.raises(ValueError, match="with the noise multiplier 3, costs more"):
        asked.plan(population=5000, cohort=250, rounds=200, measurement=True)


@pytest.mark.parametrize("convention", ["coins", "picked"])
def test_a_simulated_federation_measures(people: FederatedDataset, convention: str) -> None:
    run = train(people, privacy=fpfl.Privacy(8.0, convention=convention), rounds=2)
    assert run.scaling is not None
    assert run.scaling.of("measured") == ("age", "score", "job")
    assert run.privacy is not None
    assert 0 < run.privacy.epsilon_measurement < run.privacy.epsilon <= 8.0
    assert "in which everybody takes part" in str(run.privacy)


# --- what is sent ---------------------------------------------------------------------------------


def test_one_user_moves_the_sum_by_the_bound_and_nothing_else(people: FederatedDataset) -> None:
    """Whatever the rows of one user are, broken ones too, the rest of the sum stays bit for bit."""
    columns = people.columns
    rng = np.random.default_rng(0)
    whole = input_sum(people, columns)
    for user in (0, 7, USERS - 1):
        place = slice(*people.offsets[user : user + 2].tolist())
        without = whole - (whole - input_sum(people, columns, {user}))
        for values in (0.0, float("nan"), 3.0, float(rng.normal())):
            features = people.features.clone()
            features[place] = values
            changed = replace(people, features=features, checked=False)
            mine = input_sum(changed, columns) - without
            assert np.array_equal(input_sum(changed, columns, {user}), without)
            norm = float(np.linalg.norm(mine * 2.0**-STEP_BITS))
            assert norm <= np.sqrt(len(columns))
            assert (mine >= 0).all()


def test_the_training_depends_on_the_inputs_figures_through_the_release_alone(
    either: FederatedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise in place of the sum: other users then give the same scaling, bit for bit."""
    monkeypatch.setattr(
        MeasurementPlan,
        "release",
        lambda self, total, source: np.arange(self.size, dtype=np.float64) * 100,
    )
    other = replace(either, features=either.features.flip(0))
    first, second = (train(data, privacy=PRIVATE, noise_seed=3) for data in (either, other))
    assert first.scaling == second.scaling


def test_the_release_has_the_plans_noise(
    people: FederatedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[MeasurementPlan] = []
    real = MeasurementPlan.release

    def release(self: MeasurementPlan, total: Any, source: Any) -> Any:
        seen.append(self)
        assert source.seeded
        return real(self, total, source)

    monkeypatch.setattr(MeasurementPlan, "release", release)
    run = train(people, privacy=PRIVATE, noise_seed=3)
    (plan,) = seen
    assert run.privacy is not None
    assert plan.noise_multiplier == run.privacy.measurement
    assert plan.bound == np.sqrt(3)
    assert plan.noise_stddev >= plan.bound * plan.noise_multiplier
    # So few users: bins are halved until a median's rank is known within a tenth of them.
    assert plan.columns == input_cells(people.columns, plan.columns[0].bins)
    assert plan.columns[0].bins < 64
    assert plan.rank_error(0.5) <= 0.1 or plan.columns[0].bins == 8


# --- declared, exact, none ------------------------------------------------------------------------


def test_what_is_declared_costs_nothing(table: Path) -> None:
    declared = replace(
        SCHEMA,
        features=(
            replace(FEATURES[0], centre=40, scale=10),
            replace(FEATURES[1], centre=0, scale=1),
            replace(FEATURES[2], shares=(0.5, 0.25)),
        ),
    )
    run = train(fpfl.read_table(table, declared), privacy=PRIVATE, noise_seed=1)
    assert run.scaling is not None
    assert run.scaling.of("declared") == ("age", "score", "job")
    assert run.privacy is not None
    assert run.privacy.measurement is None
    plain = train(fpfl.read_table(table, SCHEMA), privacy=PRIVATE, noise_seed=1, measure=False)
    assert plain.privacy == run.privacy
    assert plain.scaling is None


def test_without_privacy_the_figures_are_exact(people: FederatedDataset) -> None:
    found = exact_inputs(people, people.columns)
    sizes = people.sizes().numpy()
    weights = np.repeat(1 / sizes, sizes)
    age = people.features[:, 0].double().numpy()
    centre, width = found["age"].centre, found["age"].width
    assert weights[age < centre].sum() <= USERS / 2 <= weights[age <= centre].sum()
    assert width == pytest.approx(10 * 6 / 1000, rel=0.15)
    assert found["score"].missing == pytest.approx(
        float(weights @ people.features[:, 2].double().numpy() / USERS)
    )
    shares = weights @ people.features[:, 3:].double().numpy() / USERS
    assert found["job"].shares == pytest.approx(tuple(shares))
    run = train(people)
    assert run.scaling is not None
    assert run.scaling.of("exact") == ("age", "score", "job")
    assert run.scaling.centre[0] == np.float32(centre)


def test_units_do_not_matter(tmp_path: Path, table: Path) -> None:
    """A column and its range in other units: nothing changes but the last digits."""
    (tmp_path / "mm.csv").write_text(rows(times=1000.0))
    mm = replace(SCHEMA, features=(NumberColumn("age", (0, 1_000_000)), *FEATURES[1:]))
    for options in ({}, {"privacy": PRIVATE, "noise_seed": 2}):
        one = train(fpfl.read_table(table, SCHEMA), **options)
        other = train(fpfl.read_table(tmp_path / "mm.csv", mm), **options)
        assert one.scaling is not None
        assert other.scaling is not None
        assert one.scaling.centre == pytest.approx(other.scaling.centre, abs=1e-5)
        assert one.scaling.width == pytest.approx(other.scaling.width, abs=1e-5)


def test_two_values_are_a_category(tmp_path: Path) -> None:
    lines = ["flag,y", *(f"{int(n % 4 == 0)},{n % 2}" for n in range(4000))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    schema = fpfl.TableSchema(
        label=Label("y", classes=(0, 1)), features=(NumberColumn("flag", (0, 1)),)
    )
    data = fpfl.read_table(tmp_path / "t.csv", schema)
    for options in ({}, {"privacy": PRIVATE, "noise_seed": 2}):
        scaling = train(data, **options).scaling
        assert scaling is not None
        # In the inputs' units, −3 and 3: p = 1/4 and √(p(1 − p)).
        assert scaling.centre[0] == pytest.approx(-3 + 6 / 4, abs=0.15)
        assert scaling.width[0] == pytest.approx(6 * np.sqrt(3 / 16), abs=0.1)


def test_a_column_that_drowns_keeps_its_range(people: FederatedDataset) -> None:
    run = train(people, privacy=fpfl.Privacy(epsilon=0.02, clip=1.0), noise_seed=1)
    assert run.scaling is not None
    assert run.scaling.of("range") == ("age", "score", "job")
    assert (run.scaling.centre[0], run.scaling.width[0]) == (0.0, 1.0)


# --- ranks ----------------------------------------------------------------------------------------


def rank(z: Any) -> Any:
    return np.vectorize(NormalDist().cdf)(np.asarray(z, dtype=np.float64))


def test_ranks_cost_what_a_scaling_costs(
    people: FederatedDataset, ranked: FederatedDataset
) -> None:
    """The same release: as many numbers, the same noise, and the rounds have theirs."""
    one, other = (train(data, privacy=PRIVATE, noise_seed=1) for data in (people, ranked))
    assert one.privacy == other.privacy
    assert other.scaling is not None
    assert other.scaling.of("measured") == ("age", "score", "job")
    cells = [input_cells(data.columns) for data in (people, ranked)]
    assert [each.size for each in cells[0]] == [each.size for each in cells[1]]


def test_one_users_rows_move_one_users_share_of_ranks(ranked: FederatedDataset) -> None:
    """Whatever the rows are: no more than with other transforms."""
    whole, columns = input_sum(ranked, ranked.columns), ranked.columns
    features = ranked.features.clone()
    features[slice(*ranked.offsets[7:9].tolist())] = 2.9
    other = input_sum(replace(ranked, features=features, checked=False), columns)
    both = [each - input_sum(ranked, columns, {7}) for each in (whole, other)]
    assert all(np.linalg.norm(each * 2.0**-STEP_BITS) <= np.sqrt(len(columns)) for each in both)


@pytest.mark.parametrize("private", [False, True])
def test_ranks_are_normal_whatever_the_column_is(tmp_path: Path, private: bool) -> None:
    """Three columns that differ in units: the same inputs, to a 32nd of a rank."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=4000)
    lines = ["plain,cube,income,y"]
    lines += [f"{x:.6f},{x**3:.6f},{30_000 * np.exp(x):.3f},{int(x > 0)}" for x in a]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    ends = {"plain": (-10, 10), "cube": (-1000, 1000), "income": (0, 1e7)}
    schema = fpfl.TableSchema(
        label=Label("y", classes=(0, 1)),
        features=tuple(NumberColumn(n, each, transform="quantile") for n, each in ends.items()),
    )
    data = fpfl.read_table(tmp_path / "t.csv", schema)
    options = {"privacy": fpfl.Privacy(20.0, clip=1.0), "noise_seed": 1} if private else {}
    run = train(data, **options)
    assert run.scaling is not None
    z = run.scaling(data.features).double().numpy()
    ranks = (np.argsort(np.argsort(a)) + 0.5) / len(a)
    # What is measured has bins, too: 19% of all cubes are in one of them.
    off = np.abs(rank(z) - ranks.clip(1 / 64, 63 / 64)[:, None]).max(0)
    assert (off < (0.1 if private else 1 / 32 + 1e-3)).all()
    assert z.std(0) == pytest.approx([1.0] * 3, abs=0.1)
    assert np.abs(z).max() < 2.16


def test_ranks_are_in_any_units_what_they_were(tmp_path: Path, table: Path) -> None:
    (tmp_path / "mm.csv").write_text(rows(times=1000.0))
    wide = replace(RANKED.features[0], range=(0, 1_000_000))
    mm = replace(RANKED, features=(wide, *RANKED.features[1:]))
    for options in ({}, {"privacy": PRIVATE, "noise_seed": 2}):
        data = [fpfl.read_table(table, RANKED), fpfl.read_table(tmp_path / "mm.csv", mm)]
        first, second = (train(each, **options) for each in data)
        assert first.scaling is not None
        assert second.scaling is not None
        knots, others = (np.array(each.scaling.knots) for each in (first, second))
        assert np.abs(knots - others).max() < 1e-3  # values are read to the last digits they have


def test_common_values_are_in_the_middle_of_their_ranks(tmp_path: Path) -> None:
    """Three in four are 0: no large, constant input."""
    lines = ["gain,y", *(f"{n if n % 4 == 0 else 0},{n % 2}" for n in range(1, 4001))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    schema = fpfl.TableSchema(
        label=Label("y", classes=(0, 1)),
        features=(NumberColumn("gain", (0, 1e5), transform="quantile"),),
    )
    data = fpfl.read_table(tmp_path / "t.csv", schema)
    for options in ({}, {"privacy": fpfl.Privacy(20.0, clip=1.0), "noise_seed": 2}):
        scaling = train(data, **options).scaling
        assert scaling is not None
        z = scaling(data.features)[:, 0]
        assert rank(z.min()) == pytest.approx(0.375, abs=0.03)
        assert abs(z.mean()) < 0.15
        assert z.max() > 1.5


def test_ranks_that_drown_keep_their_range(ranked: FederatedDataset) -> None:
    run = train(ranked, privacy=fpfl.Privacy(epsilon=0.02, clip=1.0), noise_seed=1)
    assert run.scaling is not None
    assert run.scaling.of("range") == ("age", "score", "job")
    kept = run.scaling(ranked.features)
    assert torch.allclose(kept[:, 0], ranked.features[:, 0], atol=1e-5)


def test_declared_quantiles_cost_nothing(table: Path) -> None:
    features = (
        replace(RANKED.features[0], quantiles=(0, 33, 40, 47, 1000)),
        replace(RANKED.features[1], quantiles=(-100, 0, 100)),
        replace(FEATURES[2], shares=(0.5, 0.25)),
    )
    data = fpfl.read_table(table, replace(RANKED, features=features))
    run = train(data, privacy=PRIVATE, noise_seed=1)
    assert run.scaling is not None
    assert run.privacy is not None
    assert run.scaling.of("declared") == ("age", "score", "job")
    assert run.privacy.measurement is None
    years = torch.zeros(4, data.features.shape[1])
    years[:, 0] = 6 * torch.tensor([0.0, 40.0, 43.5, 1000.0]) / 1000 - 3
    ranks = rank(run.scaling(years)[:, 0])
    assert ranks == pytest.approx([1 / 64, 0.5, 0.625, 63 / 64], abs=2e-3)


# --- it travels with the model --------------------------------------------------------------------


def test_the_model_takes_rows_as_the_table_gives_them(
    either: FederatedDataset, tmp_path: Path
) -> None:
    run = train(either, privacy=PRIVATE, noise_seed=1)
    assert isinstance(run.model, ScaledModel)
    assert run.scaling is not None
    assert torch.equal(run.model(either.features), run.model.model(run.scaling(either.features)))
    assert run.settings["layout"]["parameters"] == sum(p.numel() for p in run.model.parameters())
    run.save(tmp_path / "run")
    again = load_model(
        fpfl.mlp(either.schema.shape[0], (4,)), load_file(tmp_path / "run" / "model.safetensors")
    )
    assert torch.equal(again(either.features), run.model(either.features))
    assert "measured with privacy (age, score, job)" in str(run)
    path = fpfl.export_torch(run.model, either.schema, tmp_path / "m.pt2", about={})
    scores, _ = torch.export.load(path).module()(either.features[:5])
    positive = torch.sigmoid(run.model(either.features[:5]))[:, 0]
    assert torch.allclose(scores[:, 1], positive, atol=1e-5)


def test_side_by_side_is_as_one_by_one(either: FederatedDataset) -> None:
    settings = {"cohort": 40, "rounds": 4, "privacy": PRIVATE, "learning_rate": 0.1}
    jobs = [
        Job(fpfl.mlp(either.schema.shape[0], (4,), seed=0), either, settings | more)
        for more in (
            {"seed": 1, "noise_seed": 1},
            {"seed": 1, "noise_seed": 2},
            {"seed": 1, "noise_seed": 1, "learning_rate": 0.2},
        )
    ]
    runs = dict(trained(jobs))
    assert "side by side" in " ".join(runs[0].warnings)
    assert runs[0].scaling == runs[2].scaling != runs[1].scaling
    for number, job in enumerate(jobs):
        alone = fpfl.train(job.model, job.data, **job.settings)
        assert alone.scaling == runs[number].scaling
        assert alone.privacy == runs[number].privacy
        assert torch.allclose(
            alone.model(either.features), runs[number].model(either.features), atol=1e-5
        )


# --- kept, charged, never again -------------------------------------------------------------------


def in_folder(
    data: FederatedDataset, folder: Path, *, resume: bool = False, **options: Any
) -> fpfl.Run:
    keep = RunFolder(folder, resume=resume, checkpoint_every=2)
    return train(data, folder=keep, privacy=PRIVATE, **options)


class Killed(BaseException):
    """Stands for the end of the process."""


def die(*_: Any, **__: Any) -> None:
    raise Killed


def before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MeasurementPlan, "release", die)


def before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunLedger, "record_scaling", die)


def before_round_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulation, "release", die)


@pytest.mark.parametrize("where", [before_it, before_it_is_written, before_round_one])
@pytest.mark.parametrize("noise_seed", [5, None])
def test_a_run_that_is_killed_measures_once(
    either: FederatedDataset,
    tmp_path: Path,
    where: Callable[[pytest.MonkeyPatch], None],
    noise_seed: int | None,
) -> None:
    ledger = tmp_path / "people.jsonl"
    PopulationLedger.create(ledger, population=USERS, epsilon=50.0).close()
    options = {"ledger": ledger, "noise_seed": noise_seed}
    with pytest.MonkeyPatch.context() as patch:
        where(patch)
        with pytest.raises(Killed):
            in_folder(either, tmp_path / "run", **options)
    kept = OpenRun(tmp_path / "run").ledger.scaling
    assert (kept is not None) == (where is before_round_one)
    with pytest.MonkeyPatch.context() as patch:
        if kept is not None:  # it must not even be asked for again
            patch.setattr(MeasurementPlan, "release", die)
        run = in_folder(either, tmp_path / "run", resume=True, **options)
    assert run.scaling is not None
    if kept is not None:
        assert run.scaling.as_dict() == json.loads(json.dumps(kept["scaling"])) or (
            fpfl.data.inputs.Scaling.from_dict(kept["scaling"]) == run.scaling
        )
    opened = OpenRun(tmp_path / "run").ledger
    kinds = [record["kind"] for record in opened.chain.records]
    assert kinds.count("scaling") == 1
    assert kinds.index("scaling") < kinds.index("charge")
    with PopulationLedger.open(ledger, write=False) as theirs:
        charges = theirs.charges()
    assert opened.terms is not None
    assert charges == {opened.terms.mechanism: 6, opened.terms.measurement: 1}
    if noise_seed is not None:
        whole = in_folder(either, tmp_path / "whole", noise_seed=noise_seed)
        assert whole.scaling == run.scaling
        assert torch.equal(whole.model(either.features), run.model(either.features))


@pytest.mark.parametrize("killed_again", [False, True])
@pytest.mark.parametrize("noise_seed", [5, None])
def test_a_copy_that_is_restored_pays_for_its_own_measurement(
    people: FederatedDataset, tmp_path: Path, noise_seed: int | None, killed_again: bool
) -> None:
    """The original may have gone on meanwhile; a seed draws the same figures again."""
    ledger, original, copy = (tmp_path / name for name in ("people.jsonl", "run", "copy"))
    PopulationLedger.create(ledger, population=USERS, epsilon=50.0).close()
    options = {"ledger": ledger, "noise_seed": noise_seed}

    def killed(where: Callable[[pytest.MonkeyPatch], None], folder: RunFolder) -> None:
        with pytest.MonkeyPatch.context() as patch:
            where(patch)
            with pytest.raises(Killed):
                train(people, folder=folder, privacy=PRIVATE, **options)

    killed(before_it_is_written, RunFolder(original))
    shutil.copytree(original, copy)
    killed(before_round_one, RunFolder(original, resume=True))
    assert OpenRun(original).ledger.scaling is not None
    moved = RunFolder(copy, resume=True, moved=True)
    if killed_again:
        killed(before_it_is_written, moved)
        moved = RunFolder(copy, resume=True)
    train(people, folder=moved, privacy=PRIVATE, **options)
    in_folder(people, copy, resume=True, **options)  # both ledgers still agree
    opened = OpenRun(copy).ledger
    assert opened.terms is not None
    assert opened.spent == 6
    with PopulationLedger.open(ledger, write=False) as theirs:
        assert theirs.charged(opened.run, opened.terms.mechanism) == 6
        times = theirs.charged(opened.run, opened.terms.measurement)
    assert times == (2 if noise_seed is None else 1)


@pytest.mark.parametrize("left", [1, 60, 500])
@pytest.mark.parametrize("noise_seed", [5, None])
def test_a_torn_measurement_is_not_made_again(
    people: FederatedDataset, tmp_path: Path, noise_seed: int | None, left: int
) -> None:
    """Its first figures may be in the file: with others, two would be known, and one paid for."""
    ledger, folder = tmp_path / "people.jsonl", tmp_path / "run"
    PopulationLedger.create(ledger, population=USERS, epsilon=50.0).close()
    options = {"ledger": ledger, "noise_seed": noise_seed}
    with pytest.MonkeyPatch.context() as patch:
        before_round_one(patch)
        with pytest.raises(Killed):
            in_folder(people, folder, **options)
    file = folder / "ledger.jsonl"
    content = file.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    assert b'"kind":"scaling"' in content[last:]
    file.write_bytes(content[: last + left])
    run = in_folder(people, folder, resume=True, **options)
    opened = OpenRun(folder).ledger
    assert opened.terms is not None
    with PopulationLedger.open(ledger, write=False) as theirs:
        assert theirs.charged(opened.run, opened.terms.measurement) == 1
    if noise_seed is not None:
        assert len(run.history) == 6  # the same figures, drawn again
        return
    assert run.history == []
    assert "start a new run" in str(run.stopped)
    assert run.scaling is None
    assert opened.scaling is None


def test_a_line_that_was_torn_before_the_measurement_does_not_stop_it(
    people: FederatedDataset, tmp_path: Path
) -> None:
    ledger, folder = tmp_path / "people.jsonl", tmp_path / "run"
    PopulationLedger.create(ledger, population=USERS, epsilon=50.0).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLedger, "charge_scaling", die)
        with pytest.raises(Killed):
            in_folder(people, folder, ledger=ledger)
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"n":2,"time":"20')
    run = in_folder(people, folder, resume=True, ledger=ledger)
    assert run.scaling is not None
    assert len(run.history) == 5  # a torn line may have been a round's charge


def test_a_run_that_goes_on_keeps_its_scaling_and_its_noise(
    either: FederatedDataset, tmp_path: Path
) -> None:
    """Other users' figures now, more rounds: what was written down is used, and charged once."""
    asked = replace(PRIVATE, budget=8.0)
    keep = RunFolder(tmp_path / "run")
    first = train(either, folder=keep, privacy=asked)
    other = replace(either, features=either.features.flip(0))
    again = train(other, folder=RunFolder(tmp_path / "run", resume=True), privacy=asked, rounds=8)
    assert first.scaling == again.scaling
    assert first.privacy is not None
    assert again.privacy is not None
    assert again.privacy.measurement == first.privacy.measurement
    assert again.privacy.noise_multiplier == first.privacy.noise_multiplier
    assert (again.privacy.rounds, again.privacy.epsilon) == (8, pytest.approx(8.0, rel=1e-6))
    ledger = OpenRun(tmp_path / "run").ledger
    assert ledger.terms is not None
    assert ledger.filter is not None
    assert ledger.all_charges == {ledger.terms.mechanism: 8, ledger.terms.measurement: 1}
    assert ledger.filter.fits(ledger.all_charges)


def test_without_privacy_a_run_that_goes_on_keeps_its_scaling(
    either: FederatedDataset, tmp_path: Path
) -> None:
    keep = {"folder": RunFolder(tmp_path / "run"), "seed": None}
    first = train(either, **keep)
    other = replace(either, features=either.features.clamp(max=-2.75))
    again = train(other, folder=RunFolder(tmp_path / "run", resume=True), seed=None, rounds=8)
    assert first.scaling == again.scaling != train(other).scaling


def test_a_run_without_measurement_goes_on_without(
    people: FederatedDataset, tmp_path: Path
) -> None:
    in_folder(people, tmp_path / "run", measure=False, rounds=6)
    again = in_folder(people, tmp_path / "run", resume=True, rounds=6)
    assert again.scaling is None
    assert again.privacy is not None
    assert again.privacy.measurement is None


def test_a_run_with_scaled_inputs_wants_its_table(people: FederatedDataset, tmp_path: Path) -> None:
    in_folder(people, tmp_path / "run")
    with pytest.raises(ValueError, match="scales the columns of a table"):
        in_folder(replace(people, columns=()), tmp_path / "run", resume=True)


def test_no_measurement_where_no_round_fits_behind_it(
    people: FederatedDataset, tmp_path: Path
) -> None:
    ledger = tmp_path / "people.jsonl"
    PopulationLedger.create(ledger, population=USERS, epsilon=0.5).close()
    for options in ({}, {"folder": tmp_path / "run"}):
        run = train(people, privacy=PRIVATE, ledger=ledger, **options)
        assert run.history == []
        assert "the measurement of the inputs" in str(run.stopped)
    with PopulationLedger.open(ledger, write=False) as theirs:
        assert theirs.charges() == {}


def test_who_withdrew_is_not_measured(either: FederatedDataset, tmp_path: Path) -> None:
    ledger = tmp_path / "people.jsonl"
    with PopulationLedger.create(ledger, population=USERS, epsilon=50.0) as theirs:
        theirs.withdraw(range(USERS // 2))
    source = SeededNoise(4)
    run = train(either, privacy=PRIVATE, ledger=ledger, noise_seed=4)
    features = either.features.clone()
    features[: int(either.offsets[USERS // 2])] = -3.0
    other = train(
        replace(either, features=features), privacy=PRIVATE, ledger=ledger, noise_seed=source.seed
    )
    assert run.scaling == other.scaling


def test_what_is_said(people: FederatedDataset, tmp_path: Path) -> None:
    run = in_folder(people, tmp_path / "run")
    assert run.privacy is not None
    said = "\n".join(run.privacy.lines())
    assert "measured once, to scale them" in said
    assert f"{run.privacy.measurement:.4g} bounds" in said
    assert 0.0 < run.privacy.epsilon_measurement < 4.0 / 3
    facts = fpfl.run_facts(tmp_path / "run")
    assert "3 columns measured with privacy" in facts["inputs"]
    assert "3 columns measured with privacy" in fpfl.model_card(tmp_path / "run")
    assert fpfl.run_facts(run)["inputs"] == facts["inputs"]


# --- the label of a regression --------------------------------------------------------------------

REGRESSION = replace(SCHEMA, label=Label("age", range=(0, 1000)), features=FEATURES[1:])


@pytest.mark.parametrize("private", [False, True])
def test_a_regression_is_trained_in_its_labels_spread(table: Path, private: bool) -> None:
    """On a range that is twenty times as wide the model does not end at the mean of the range."""
    data = fpfl.read_table(table, REGRESSION)
    options = {"privacy": fpfl.Privacy(20.0, clip=1.0), "noise_seed": 1} if private else {}
    run = train(data, rounds=40, cohort=200, learning_rate=0.5, **options)
    assert run.scaling is not None
    assert run.scaling.label[0] == pytest.approx(0.04, abs=0.02)
    assert run.scaling.label[1] == pytest.approx(0.01, abs=0.02)
    assert data.schema.label_unit is None
    outputs = fpfl.users.task.flatten_output(run.model(data.features), data.schema)
    assert outputs.mean().item() == pytest.approx(0.04, abs=0.01)  # units of the declared range
    plain = train(data, rounds=40, cohort=200, learning_rate=0.5, measure=False, **options)
    first, second = (each.evaluate(data, bootstrap=0).error for each in (run, plain))
    assert first is not None
    assert second is not None
    assert first < second


def test_a_labels_figures_can_be_declared(table: Path, tmp_path: Path) -> None:
    declared = replace(REGRESSION, label=replace(REGRESSION.label, centre=40, scale=10))
    (tmp_path / "s.toml").write_text(declared.toml())
    assert fpfl.data.read_table_schema(tmp_path / "s.toml") == declared
    run = train(fpfl.read_table(table, declared))
    assert run.scaling is not None
    assert run.scaling.label == pytest.approx((0.04, 0.01))
    with pytest.raises(ValueError, match="centre in its range"):
        replace(REGRESSION.label, centre=-1, scale=10)
    with pytest.raises(ValueError, match="numbers of a regression"):
        replace(SCHEMA.label, centre=1, scale=10)


def test_columns_of_other_features_are_refused(people: FederatedDataset) -> None:
    schema = replace(people.schema, shape=(2,), feature_names=None, feature_ranges=None)
    fewer = replace(people, features=people.features[:, :2], schema=schema)
    with pytest.raises(ValueError, match="not those of the table any more"):
        train(fewer)
    assert train(replace(fewer, columns=())).scaling is None
    assert train(fewer, measure=False).scaling is None


def test_a_number_that_is_mostly_zero_is_zero_at_zero(tmp_path: Path) -> None:
    """Not half a bin away: with hundreds of such columns that would be a large, constant input."""
    lines = ["gain,y", *(f"{50 * (n % 100 == 0)},{n % 2}" for n in range(4000))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    schema = fpfl.TableSchema(
        label=Label("y", classes=(0, 1)), features=(NumberColumn("gain", (0, 100)),)
    )
    data = fpfl.read_table(tmp_path / "t.csv", schema)
    for options in ({}, {"privacy": PRIVATE, "noise_seed": 2}):
        scaling = train(data, **options).scaling
        assert scaling is not None
        assert scaling.of("range") == ()
        z = scaling(data.features)[:, 0]
        assert z.abs().min() < 0.05  # exactly computed, two values are a category
        assert z.max() > 4.0
