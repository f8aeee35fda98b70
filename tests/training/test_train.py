"""The front door: one path for every kind of training, and errors that help."""

from __future__ import annotations

import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, vectors
from torch import nn

import fpfl
from fpfl import Clipping, FederatedDataset, Privacy, Schema
from fpfl.aggregation import ThirdParty
from fpfl.fairness import Counts
from fpfl.methods import Unconstrained
from fpfl.numerics.randomness import RoundStreams
from fpfl.privacy import FixedSizeSampling
from fpfl.server import Selection, Simulation
from fpfl.users import CohortEngine, FlatModel

# Tiny populations drown in noise; the tests that are about these warnings catch them.
pytestmark = pytest.mark.filterwarnings("ignore:the noise dominates")

PRIVATE = Privacy(noise_multiplier=1.0, clip=1.0)


def quick(data: FederatedDataset, **settings) -> fpfl.Run:
    options = {"cohort": 10, "rounds": 5, "seed": 0} | settings
    torch.manual_seed(0)
    classes = data.schema.classes
    outputs = classes if classes and classes > 2 else 1
    model = options.pop("model", nn.Linear(*data.schema.shape, outputs))
    return fpfl.train(model, data, **options)


def parameters(run: fpfl.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_central_training_is_sgd_on_the_batch() -> None:
    """All single-sample users in each cohort, no clipping: plain gradient descent on the mean."""
    data = make_population(users=40).single_samples().to("cpu", torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    run = fpfl.train(
        model, data, cohort=data.population, rounds=7, sampling="without-replacement",
        learning_rate=0.3, selection="last", normaliser="samples",
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(7):
        optimizer.zero_grad()
        output = model(data.features).squeeze(-1)
        nn.functional.binary_cross_entropy_with_logits(output, data.labels.double()).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(parameters(run), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [fpfl.MMDM(), fpfl.BMDM(), fpfl.Tran()])
def test_central_equals_federated_without_clipping(method) -> None:
    """Who holds a sample does not matter to a sum: users of any size, the same model."""
    users = make_population(users=30, seed=5).to("cpu", torch.float64)
    torch.manual_seed(1)
    model = nn.Linear(5, 1).double()
    runs = [
        fpfl.train(
            model,
            data,
            cohort=data.population,
            rounds=6,
            constraint=fpfl.fnr_parity("sex", tolerance=0.0),
            method=method,
            sampling="without-replacement",
            selection="last",
            normaliser=50.0,
        )
        for data in (users, users.single_samples())
    ]
    torch.testing.assert_close(parameters(runs[0]), parameters(runs[1]), rtol=1e-9, atol=1e-12)


def test_central_training_with_privacy_is_dp_sgd() -> None:
    """Single-sample users, clipped and noised: the noise of a step is s/N on every weight."""
    data = make_population(users=300, features=99).single_samples()
    steps = torch.stack([
        parameters(quick(data, cohort=100, rounds=1, selection="last", model=zero_model(99),
                         privacy=Privacy(noise_multiplier=5e3, clip=Clipping(1e-3))))
        for _ in range(24)
    ])  # fmt: skip
    # s = C σ/√0.95, divided by N = 100 and times η = 0.1; 2,400 draws: 5 standard errors are 7%.
    expected = 0.1 * 5.0 / 0.95**0.5 / 100
    assert abs(float(steps.std()) / expected - 1) < 0.075


def zero_model(features: int = 5) -> nn.Linear:
    model = nn.Linear(features, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_fair_dp_sgd_runs_on_the_same_path() -> None:
    data = make_population(users=300).single_samples()
    run = quick(data, cohort=150, constraint=fpfl.fnr_parity("sex"),
                privacy=Privacy(noise_multiplier=0.5, clip=2.0))  # fmt: skip
    assert len(run.history) == 5
    assert "one user" in str(run)


def test_a_cohort_may_be_empty() -> None:
    """Poisson cohorts of expected size one are often empty; the round then releases noise."""
    data = make_population(users=20)
    assert len(quick(data, cohort=1, rounds=30).history) == 30
    assert len(quick(data, cohort=1, rounds=30, privacy=PRIVATE).history) == 30


@pytest.mark.parametrize("privacy", [None, PRIVATE])
def test_the_same_seed_gives_the_same_run(privacy) -> None:
    data = make_population(users=60)
    settings = {"privacy": privacy, "noise_seed": 3 if privacy else None,
                "constraint": fpfl.fnr_parity("sex"), "samples_per_user": 2}  # fmt: skip
    first, again, other = (quick(data, **settings | {"seed": s}) for s in (1, 1, 2))
    assert torch.equal(parameters(first), parameters(again))
    assert first.history == again.history
    assert not torch.equal(parameters(first), parameters(other))


def test_noise_is_not_seeded_by_default() -> None:
    data = make_population(users=60)
    # The last model: the best one of two runs may be the one that both begin with.
    one, two = (quick(data, privacy=PRIVATE, selection="last") for _ in range(2))
    assert not torch.equal(parameters(one), parameters(two))
    assert "no guarantee" not in str(one.privacy)
    seeded = quick(data, privacy=PRIVATE, noise_seed=1)
    assert "simulation: no guarantee against anyone who has the seed" in str(seeded.privacy)


def test_the_callers_model_is_left_alone() -> None:
    model = nn.Linear(5, 1)
    before = model.weight.detach().clone()
    quick(make_population(), model=model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("classes", "constraint"),
    [
        (2, fpfl.equalized_odds("sex")),
        (2, fpfl.demographic_parity("sex", "race")),
        (2, fpfl.fnr_parity(("sex", "race"))),
        (4, fpfl.accuracy_parity("sex", "race")),
        (None, fpfl.equal_error("sex", label_range=(-5, 5))),
    ],
)
@pytest.mark.parametrize(
    "privacy", [None, PRIVATE, Privacy(noise_multiplier=1, clip=Clipping(1, counts=1))]
)
def test_every_constraint_trains_on_the_same_path(classes, constraint, privacy) -> None:
    data = make_population(users=200, classes=classes, attributes=(SEX, RACE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fpfl.FpflWarning)
        run = quick(data, constraint=constraint, privacy=privacy, cohort=100)
    assert len(run.history) == 5
    assert bool(parameters(run).isfinite().all())
    evaluation = run.evaluate(data, bootstrap=50)
    assert "constraint" in evaluation.gaps
    json.dumps(run.history)


def test_a_constraint_is_enforced() -> None:
    """On Adult (training set) MMDM at least halves the FNR gap that SGD leaves, at its accuracy."""
    data = fpfl.load_adult()
    evaluations = {}
    for name, constraint in {"plain": None, "fair": fpfl.fnr_parity("sex")}.items():
        run = fpfl.train(
            fpfl.mlp(92, seed=0),
            data,
            cohort=400,
            rounds=500,
            constraint=constraint,
            selection="average",
            seed=0,
        )
        evaluations[name] = run.evaluate(data, bootstrap=0)
    assert evaluations["plain"].gaps["fnr"].value > 0.05
    fair = evaluations["fair"]
    assert fair.gaps["fnr"].value < 0.5 * evaluations["plain"].gaps["fnr"].value
    assert fair.accuracy > evaluations["plain"].accuracy - 0.015


def test_adam_works_as_the_server_optimizer() -> None:
    run = quick(make_population(), optimizer=lambda w: torch.optim.Adam(w, lr=0.01))
    assert len(run.history) == 5


def test_history_shows_what_was_released_and_no_more() -> None:
    row = quick(make_population(users=60), constraint=fpfl.fnr_parity("sex")).history[0]
    assert set(row) == {
        "round", "accuracy", "gap", "fair", "gradient_norm", "overall", "groups", "counts",
        "multipliers", "confusion", "balance",
    }  # fmt: skip
    assert set(row["groups"]["FNR"]) == {"sex=Female", "sex=Male"}


def test_selection_keeps_the_model_that_was_measured() -> None:
    """v_t measured w_{t−1}: with one round the initial model is the one that is kept."""
    data = make_population()
    model = nn.Linear(5, 1)
    run = quick(data, model=model, rounds=1, selection="best")
    assert torch.equal(run.model.weight, model.weight)
    last = quick(data, model=model, rounds=1, selection="last")
    assert not torch.equal(last.model.weight, model.weight)


def counts(accuracy: float, gap: float, n: float = 100.0) -> Counts:
    """Counts of two equal groups, `gap` either side of one half."""
    F = torch.tensor([[0.5 - gap, 0.5 + gap]]) * n
    return Counts(
        F=F,
        n=torch.full((1, 2), n),
        overall_F=F.sum(1),
        overall_n=torch.tensor([2 * n]),
        hits=torch.tensor(accuracy * 100),
        misses=torch.tensor(100 - accuracy * 100),
    )


def chosen(rounds: list[Counts], window: int = 1) -> tuple[int, str]:
    state = Selection("best", len(rounds), tolerance=0.02, window=window)
    for t, seen in enumerate(rounds, start=1):
        state = state.observe(t, torch.tensor([float(t)]), seen, torch.zeros(1))
    w, how = state.choose(torch.zeros(1), len(rounds))
    return int(w), how


def test_selection_prefers_fair_then_accurate() -> None:
    unknown = counts(0.99, 0.0, n=0.5)  # too few to say anything: not fair, and nothing near it
    seen = [counts(0.9, 0.3), counts(0.7, 0.2), counts(0.6, 0.01), counts(0.8, 0.01), unknown]
    assert chosen(seen)[0] == 4
    w, how = chosen([counts(0.9, 0.3), counts(0.7, 0.2), unknown])
    assert w == 2
    assert "none met the tolerance" in how


def test_a_window_judges_several_rounds_together() -> None:
    """Round 3 looks fair by luck, rounds 5 to 7 are: together they say so; their mean is kept."""
    seen = [counts(0.8, 0.2), counts(0.8, 0.2), counts(0.9, 0.0), counts(0.8, 0.2)]
    fair = [counts(0.8, 0.03), counts(0.8, -0.03), counts(0.8, 0.0)]
    assert chosen(seen + fair, window=1)[0] == 3
    w, how = chosen(seen + fair, window=3)
    assert w == 6
    assert "rounds 5 to 7" in how


def test_a_window_is_never_shorter_than_asked() -> None:
    """A lucky first round must not be judged alone."""
    lucky = [counts(0.95, 0.0)] + [counts(0.8, 0.0)] * 9
    assert "round 1" not in chosen(lucky, window=4)[1].replace("rounds 1 to 4", "")
    assert chosen([counts(0.8, 0.0)] * 2, window=10)[0] == 1  # fewer rounds than the window: all


def test_the_cap_on_participations_is_kept() -> None:
    """With a cap of 2 nobody is computed a third time, though the sampler draws them."""
    data = make_population(users=30)
    flat = FlatModel.of(nn.Linear(5, 1))
    engine = CohortEngine(flat, data)
    privacy = Privacy(noise_multiplier=1.0, clip=1.0, max_participations=2)
    blocks = privacy.clipping.blocks(constrained=False, selection=True)
    plan = privacy.plan(population=30, cohort=15, rounds=20, blocks=blocks)
    computed = []

    class Watching(CohortEngine):
        def chunks(self, users, *how):
            computed.extend(users.tolist())
            return super().chunks(users, *how)

    rng = [RoundStreams(0, "cohorts"), RoundStreams(0, "samples")]
    federation = Simulation(
        Watching(flat, data), ThirdParty(engine.layout.slices, blocks, plan), plan.sampling,
        *rng, 20,
    )  # fmt: skip
    for t in range(20):
        federation.release(t, flat.vector())
    assert set(Counter(computed).values()) == {2}
    assert len(set(computed)) == 30
    other = FixedSizeSampling(30, 15)
    with pytest.raises(ValueError, match=r"use plan\.sampling"):
        Simulation(engine, ThirdParty(engine.layout.slices, blocks, plan), other, *rng, 1)


def test_average_is_the_mean_of_the_second_half() -> None:
    state = Selection("average", rounds=4)
    for t in range(1, 5):
        state = state.observe(t, torch.zeros(1), counts(0.5, 0.0), torch.tensor([1.0 * t]))
    assert float(state.choose(torch.zeros(1), 4)[0]) == 3.5


def test_divergence_stops_with_a_message_and_keeps_a_good_model() -> None:
    data = make_population(classes=None)
    model = nn.Linear(5, 1)
    with pytest.warns(fpfl.FpflWarning, match="diverged in round"):
        run = quick(data, model=model, learning_rate=1e30, rounds=60, selection="last")
    assert "smaller learning rate" in run.stopped
    assert bool(parameters(run).isfinite().all())
    assert len(run.history) < 60


def test_a_drowned_constraint_says_so() -> None:
    with pytest.warns(fpfl.FpflWarning, match="DP noise dominates the signal of FNR in sex=Female"):
        quick(make_population(users=60), constraint=fpfl.fnr_parity("sex"),
              privacy=Privacy(noise_multiplier=50.0, clip=1.0))  # fmt: skip


def test_save_and_load(tmp_path) -> None:
    from safetensors.torch import load_file

    run = quick(make_population(users=60), privacy=PRIVATE)
    folder = run.save(tmp_path / "run")
    state = load_file(folder / "model.safetensors")
    assert torch.equal(state["weight"], run.model.weight)
    assert len(json.loads((folder / "history.json").read_text())) == 5
    about = json.loads((folder / "result.json").read_text())
    assert about["privacy"]["noise_multiplier"] == 1.0
    assert "one user" in (folder / "privacy.txt").read_text()


def test_a_model_that_is_not_finite_is_not_saved(tmp_path) -> None:
    run = quick(make_population())
    with torch.no_grad():
        run.model.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        run.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.mean(dim=0, keepdim=True))


class TrainMixing(Mixing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.layer(x)


class Probability(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


class Squeezed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cohort": 31}, "between 1 and the population 30"),
        ({"cohort": 0}, "between 1 and the population"),
        ({"rounds": 0}, "at least 1"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"learning_rate": float("nan")}, "must be positive"),
        ({"samples_per_user": 0}, "at least 1"),
        ({"normaliser": -1.0}, "positive public constant"),
        ({"clip": 1.0, "privacy": PRIVATE}, "belong to the privacy plan"),
        ({"sampling": "without-replacement", "privacy": PRIVATE}, "does not go with"),
        ({"method": fpfl.MMDM()}, "none was given"),
        ({"constraint": fpfl.fnr_parity("age")}, "no attribute 'age'"),
        ({"constraint": fpfl.equal_error("sex", label_range=(0, 1))}, "for regression"),
        ({"privacy": Privacy(epsilon=-1.0, clip=1.0)}, "epsilon"),
        ({"privacy": Privacy(noise_multiplier=1.0, clip=1.0, delta=0.5)}, "delta|δ"),
        ({"privacy": Privacy(noise_multiplier=1.0, convention="paper", neighbours="zero-out")},
         "fills the slot"),
        ({"model": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))},
         "BatchNorm1d.*mixes samples.*GroupNorm"),
        ({"model": Mixing()}, "mixes samples"),
        ({"model": nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())}, "expected logits"),
        ({"model": nn.Linear(4, 1)}, "does not take torch.float32 inputs of shape"),
        ({"model": nn.Linear(5, 2)}, "one logit for two classes"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"seed": -1}, "0 or more"),
        ({"selection": "Best"}, "expected one of"),
        ({"sampling": "fixed"}, "expected one of"),
        ({"selection_window": 0}, "at least 1"),
        ({"model": TrainMixing()}, "mixes samples"),
        ({"model": Probability()}, "returns probabilities"),
        ({"model": Squeezed()}, "use .squeeze"),
        ({"model": Counting()}, "writes its buffers"),
        ({"model": nn.Linear(5, 1).bfloat16()}, "precision"),
        ({"model": nn.Linear(5, 1).requires_grad_(False)}, "no trainable parameters"),
        ({"privacy": Privacy(noise_multiplier=1.0, population=0)}, "population"),
    ],
)  # fmt: skip
def test_bad_settings_say_what_to_do(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        quick(make_population(), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"constraint": "fnr_parity"}, {"method": fpfl.MMDM}, {"method": "mmdm"}, {"privacy": 2.0},
        {"optimizer": "adam"}, {"rounds": 3.0}, {"cohort": True}, {"device": "cuda:99"},
    ],
)  # fmt: skip
def test_bad_types_say_what_was_expected(settings) -> None:
    data = make_population()
    with pytest.raises(ValueError, match=r"expected|whole number|cannot be used"):
        quick(data, **settings)
    with pytest.raises(ValueError, match="expected a FederatedDataset"):
        fpfl.train(nn.Linear(5, 1), np.zeros((3, 5)), cohort=1, rounds=1)
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
        fpfl.train("model", data, cohort=1, rounds=1)


def test_samples_normaliser_needs_a_declared_constant() -> None:
    x = np.zeros((4, 5))
    data = FederatedDataset.from_samples(x, [0, 1, 0, 1], None, Schema((5,)))
    with pytest.raises(ValueError, match="declare samples_per_user"):
        quick(data, cohort=2, normaliser="samples")


def test_a_rate_that_no_sample_meets_is_refused() -> None:
    data = FederatedDataset.from_samples(
        np.zeros((4, 5)), [0, 0, 0, 0], [[0], [1], [0], [1]], Schema((5,), attributes=(SEX,))
    )
    with pytest.raises(ValueError, match="no sample meets the condition of the rate 'FNR'"):
        quick(data, cohort=2, constraint=fpfl.fnr_parity("sex"))
    some = FederatedDataset.from_samples(
        np.zeros((4, 5)), [0, 1, 0, 0], [[0], [1], [0], [1]], Schema((5,), attributes=(SEX,))
    )
    with pytest.raises(ValueError, match=r"no sample of \['sex=Female'\]"):
        quick(some, cohort=2, constraint=fpfl.fnr_parity("sex"))


def test_a_range_that_is_not_the_schemas_is_refused() -> None:
    data = make_population(classes=None)
    with pytest.raises(ValueError, match="use the schema's"):
        quick(data, constraint=fpfl.equal_error("sex", label_range=(0, 1)))


def test_two_class_rates_ask_for_the_positive_class_of_many() -> None:
    data = make_population(users=100, classes=4)
    with pytest.raises(ValueError, match="say which class"):
        quick(data, constraint=fpfl.equalized_odds("sex"))
    assert quick(data, constraint=fpfl.fnr_parity("sex", positive=3)).history


@pytest.mark.parametrize("span", [1.0, 10_000.0])
def test_regression_learns_whatever_the_labels_unit(span: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5)).clip(-2, 2)
    y = span * (0.5 + x @ np.array([0.05, -0.04, 0.03, 0.0, 0.02]))
    schema = Schema((5,), classes=None, label_range=(0.0, span))
    data = FederatedDataset.from_samples(x, y, None, schema)
    run = quick(data, cohort=200, rounds=200, learning_rate=0.3, selection="last")
    assert run.evaluate(data, bootstrap=0).error < 0.02


def test_dropout_counts_the_model_that_is_released() -> None:
    """With everything dropped in training, counts are still those of the whole model."""
    data = make_population(users=300)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.9), nn.Linear(16, 1))
    settings = {"model": model, "cohort": 300, "rounds": 3, "sampling": "without-replacement"}
    run, again = (quick(data, **settings, selection="last") for _ in range(2))
    assert run.history == again.history
    first = fpfl.evaluate_model(model, data, bootstrap=0).accuracy
    assert run.history[0]["accuracy"] == pytest.approx(first)


def test_nobody_else_can_spoil_a_users_vector() -> None:
    """A sample that makes the model NaN must not reach users who do not have it."""

    class Normalising(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x / x.norm(dim=-1, keepdim=True))

    data = make_population(users=50, mean=3)
    spoilt = data.features.clone()
    spoilt[0] = 0.0
    bad = FederatedDataset(spoilt, data.labels, data.attributes, data.offsets, data.schema)
    flat = FlatModel.of(Normalising(5, 1))
    others = np.arange(1, data.population)
    one, two = (vectors(CohortEngine(flat, d), flat.vector(), others) for d in (data, bad))
    assert torch.equal(one, two)


def test_a_frozen_model_can_be_evaluated() -> None:
    model = nn.Linear(5, 1).requires_grad_(False)
    assert fpfl.evaluate_model(model, make_population(), bootstrap=0).accuracy is not None
    with pytest.raises(ValueError, match="expected logits"):
        fpfl.evaluate_model(nn.Sequential(nn.Linear(5, 1), nn.Sigmoid()), make_population())


def test_callbacks_may_keep_what_they_see() -> None:
    seen = []
    quick(make_population(), callbacks=[lambda event: seen.append(event.w)])
    assert not torch.equal(seen[0], seen[-1])


def test_tied_weights_can_be_saved(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(5, 5)
            self.two = nn.Linear(5, 5)
            self.two.weight = self.one.weight
            self.out = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.two(self.one(x)))

    run = quick(make_population(), model=Tied())
    assert (run.save(tmp_path / "run") / "model.safetensors").exists()


def test_a_hypothetical_population_shows_the_real_epsilon() -> None:
    run = quick(
        make_population(users=60), privacy=Privacy(noise_multiplier=1.0, clip=1.0, population=6000)
    )
    assert run.privacy.epsilon_real > run.privacy.epsilon
    assert "HYPOTHETICAL" in str(run.privacy)


def test_unconstrained_method_is_allowed_without_constraint() -> None:
    assert len(quick(make_population(), method=Unconstrained()).history) == 5
