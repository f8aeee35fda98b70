"""Trainings side by side against the same trainings alone."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import RACE, SEX, make_population, thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fpfl
from fpfl.numerics.randomness import RoundStreams
from fpfl.numerics.summing import ByRun
from fpfl.server.simulation import Simulation
from fpfl.sweeps import batch
from fpfl.sweeps.batch import Job, trained
from fpfl.training.session import prepare
from fpfl.users.factored import FactoredGradients

pytestmark = [
    pytest.mark.filterwarnings("ignore::fpfl.FpflWarning"),
    pytest.mark.filterwarnings("ignore::fpfl.privacy.plan.PrivacyWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

MODELS = {
    "linear": lambda: nn.Linear(5, 1),
    "perceptron": lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)),
    "without bias": lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 1)),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Linear(4, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 1)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)),
    "three classes": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)),
    "by hand": lambda: ByHand(),
}
CONSTRAINTS = {
    "none": None,
    "fnr": fpfl.fnr_parity("sex", tolerance=0.05),
    "odds": fpfl.equalized_odds("sex", "race"),
    "parity": fpfl.demographic_parity("race"),
}
ACCURACY = fpfl.accuracy_parity("sex")
METHODS = {
    "mmdm": fpfl.MMDM(damping=2.0, multiplier_lr=0.5),
    "bmdm": fpfl.BMDM(multiplier_lr=0.5),
    "tran": fpfl.Tran(multiplier_lr=0.5),
    "one-gradient": fpfl.OneGradient(),
    "patient": fpfl.OneGradient(patience=2),
    "surrogates": fpfl.OneGradient(surrogate="rate", ratchet=True, spread=None),
}
CLIPS = {
    "joint": 0.7,
    "counts": fpfl.Clipping(0.7, counts=2.0),
    "clipped": fpfl.Clipping(0.7, counts=2.0, clipped_share=0.05),
    "adapts": fpfl.Clipping(0.7, counts=2.0, adapts=fpfl.AdaptiveBound(0.3, rate=1.0)),
    "joint, adapts": fpfl.Clipping(0.2, adapts=fpfl.AdaptiveBound(0.3, rate=1.0, reference=0.4)),
}


class ByHand(nn.Module):
    """Parameters that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 1) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * 2


def made(model: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[model]()


def people(
    seed: int = 0, users: int = 40, mean: float = 3.0, classes: int = 2
) -> fpfl.FederatedDataset:
    return make_population(users, mean=mean, attributes=(SEX, RACE), seed=seed, classes=classes)


def alone(job: Job) -> fpfl.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fpfl.train(job.model, job.data, **job.settings)


def together(jobs: list[Job], **how) -> list[fpfl.Run]:
    found = dict(trained(jobs, **how))
    return [found[number] for number in range(len(jobs))]


def alike(one: fpfl.Run, other: fpfl.Run, tolerance: float = 2e-5) -> None:
    """The same model, history, choice, ε and notes, to rounding."""
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)
    assert one.selected == other.selected
    assert one.stopped == other.stopped
    assert len(one.history) == len(other.history)
    for row, wanted in zip(one.history, other.history, strict=True):
        assert flat(row).keys() == flat(wanted).keys()
        for name, value in flat(row).items():
            same = flat(wanted)[name]
            if value is None or same is None:
                assert value is same, name
            else:
                assert value == pytest.approx(same, rel=1e-3, abs=1e-4), name
    assert one.settings == other.settings
    if one.privacy is None or other.privacy is None:
        assert one.privacy is other.privacy
    else:
        assert one.privacy.as_dict() == other.privacy.as_dict()
    assert one.warnings[1:] == other.warnings


def flat(row: dict, before: str = "") -> dict:
    found = {}
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(i): each for i, each in enumerate(value)}
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def never_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be grouped would be the same by being the same call."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("trained alone")

    monkeypatch.setattr(batch, "train", refused)


@pytest.mark.parametrize("model", MODELS)
@given(
    constraint=st.sampled_from(list(CONSTRAINTS)),
    method=st.sampled_from(list(METHODS)),
    clip=st.sampled_from([None, *CLIPS]),
    convention=st.sampled_from([None, "poisson", "replace-one", "paper"]),
    rule=st.sampled_from(["best", "last", "average"]),
    window=st.sampled_from([1, 3]),
    limit=st.sampled_from([None, 2]),
    cap=st.sampled_from([None, 2]),
    adam=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=thorough(10, 60))
def test_runs_of_a_group_are_those_alone(
    model, constraint, method, clip, convention, rule, window, limit, cap, adam, seed
) -> None:
    """Over methods, constraints, models, clipping, conventions and selection, in float32."""
    rng = np.random.default_rng(seed)
    data = people(seed, classes=3 if model == "three classes" else 2)
    jobs = []
    for run in range(3):
        given_: dict = {
            "cohort": 15,
            "rounds": 6,
            "seed": int(rng.integers(4)),
            "selection": rule,
            "selection_window": window if rule == "best" else 1,
            "samples_per_user": limit,
        }
        rate = float(rng.uniform(0.05, 0.2))
        if adam:
            given_["optimizer"] = lambda w, rate=rate: torch.optim.Adam(w, lr=rate)
        else:
            given_["learning_rate"] = rate
        if CONSTRAINTS[constraint] is not None:
            wanted = CONSTRAINTS[constraint]
            if model == "three classes":
                wanted = ACCURACY
            given_["constraint"] = replace(wanted, tolerance=float(rng.uniform(0.01, 0.2)))
            own = METHODS[method]
            given_["method"] = replace(own, multiplier_lr=float(rng.uniform(0.1, 1.0)))
        if convention is not None:
            bounds = CLIPS[clip or "joint"]
            capped = cap if convention == "poisson" else None
            given_["privacy"] = fpfl.Privacy(
                noise_multiplier=float(rng.uniform(0.3, 1.0)),
                clip=bounds,
                convention=convention,
                max_participations=capped,
            )
            given_["noise_seed"] = int(rng.integers(100))
        elif clip is not None:
            given_["clip"] = CLIPS[clip]
        jobs.append(Job(made(model, run), data, given_))
    with pytest.MonkeyPatch.context() as patch:
        if not (model == "by hand" and convention is not None):
            never_alone(patch)
        found = together(jobs)
    for job, run in zip(jobs, found, strict=True):
        single = alone(job)
        if model == "by hand" and convention is not None:
            continue  # computed alone, and so by the very call
        alike(run, single)


@pytest.mark.parametrize("model", ["linear", "perceptron", "without bias", "in place", "norm"])
@pytest.mark.parametrize("method", ["mmdm", "one-gradient"])
@given(
    seed=st.integers(0, 1000),
    bound=st.floats(0.1, 3.0),
    mean=st.sampled_from([1.0, 4.0, 20.0]),
    adapts=st.booleans(),
)
@settings(max_examples=8)
def test_sums_are_those_of_the_single_run_to_the_last_bit(
    model, method, seed, bound, mean, adapts
) -> None:
    """Given w: what a user sends depends on nobody's run but its own, and sums are exact."""
    rng = np.random.default_rng(seed)
    data = people(seed, users=60, mean=mean)

    def clip(run: int) -> fpfl.Clipping | float:
        if not adapts:
            return bound * (1 + run)
        counts = None if method == "mmdm" else 2.0
        follows = fpfl.AdaptiveBound(0.1 + 0.3 * run, rate=2.0)
        return fpfl.Clipping(bound * (1 + run), counts=counts, adapts=follows)

    trainings = [
        prepare(
            made(model, run),
            data,
            cohort=20,
            rounds=3,
            constraint=fpfl.fnr_parity("sex"),
            method=METHODS[method],
            privacy=fpfl.Privacy(noise_multiplier=float(rng.uniform(0.3, 1.0)), clip=clip(run)),
            seed=run,
            noise_seed=run,
        )
        for run in range(3)
    ]
    engine, refused = batch._engine(trainings, None)
    assert refused is None
    releases = []
    real = batch.SideBySide.release

    def kept(self, round, w, weights, levels=None):
        v = real(self, round, w, weights, levels)
        releases.append((round, w, weights, levels, v))
        return v

    group = batch._Group(list(range(3)), trainings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch.SideBySide, "release", kept)
        list(batch._run(group, engine, None))
    assert len(releases) == 3
    if adapts:  # runs differ in their levels in the same round
        assert any(len(set(levels)) > 1 for _, _, _, levels, _ in releases)
    for run, one in enumerate(trainings):
        own, _ = one.engine(None)
        streams = RoundStreams(run, "cohorts"), RoundStreams(run, "samples")
        simulation = Simulation(own, one.third_party, one.sampling, *streams, 3)
        for round, w, weights, levels, v in releases:
            mine = None
            if weights is not None:
                mine = replace(
                    weights,
                    groups=weights.groups[run],
                    overall=weights.overall[run],
                    low=float(weights.low[run]),
                    high=float(weights.high[run]),
                )
            level = None if levels is None else levels[run]
            assert torch.equal(simulation.release(round, w[run], mine, level), v[run]), (run, round)


def job(run: int, data: fpfl.FederatedDataset, **more) -> Job:
    given_ = {
        "cohort": 15,
        "rounds": 8,
        "constraint": fpfl.fnr_parity("sex"),
        "method": fpfl.OneGradient(),
        "privacy": fpfl.Privacy(noise_multiplier=0.5, clip=1.0),
        "seed": run,
        "noise_seed": run,
    }
    return Job(made("perceptron", run), data, given_ | more)


@pytest.mark.parametrize("model", ["linear", "perceptron", "norm", "dropout"])
@pytest.mark.parametrize("method", [None, "one-gradient"])
@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("patient", [False, True])
def test_whole_runs_are_those_alone_to_the_last_bit(
    monkeypatch, model, method, adapts, patient
) -> None:
    """With methods whose step is made of operations number by number, on a CPU."""
    if patient and method is None:
        pytest.skip("patience is one gradient's")
    never_alone(monkeypatch)
    data = people()
    jobs = []
    for run in range(3):
        more: dict = {
            "learning_rate": 0.05 + 0.1 * run,
            "privacy": fpfl.Privacy(noise_multiplier=0.4 + 0.1 * run, clip=1.0 + run),
            "rounds": 40,
        }
        if adapts:
            follows = fpfl.AdaptiveBound(0.2 + 0.3 * run, rate=0.5, reference=1.0)
            clip = fpfl.Clipping(0.5 + run, counts=None if method is None else 2.0, adapts=follows)
            more["privacy"] = replace(more["privacy"], clip=clip)
        more |= {"constraint": None, "method": None}
        if method is not None:
            more["method"] = fpfl.OneGradient(
                damping=1.0 + run, decay=0.9 + 0.03 * run, patience=5 * run if patient else None
            )
            more["constraint"] = fpfl.fnr_parity("sex")
        jobs.append(replace(job(run, data, **more), model=made(model, run)))
    found = together(jobs)
    monkeypatch.undo()
    if patient:  # each released its weights when its own patience was over
        least = [[row["least_weight"] for row in run.history] for run in found]
        assert all(set(each[: 5 * run]) <= {1.0} for run, each in enumerate(least))
        assert min(map(min, least)) < 1.0
    for one, run in zip(jobs, found, strict=True):
        single = alone(one)
        assert run.history == single.history
        for mine, theirs in zip(run.model.parameters(), single.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_different_populations_and_numbers_of_users_are_one_group(monkeypatch) -> None:
    never_alone(monkeypatch)
    jobs = [job(run, people(run, users=40 + 7 * run)) for run in range(3)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))
    sigmas = {run.privacy.epsilon for run in found}
    assert len(sigmas) == 3  # each with its own K


def test_populations_of_one_size_have_cohorts_of_their_own_people(monkeypatch) -> None:
    """With the same seed, too: the same places are drawn, of other people."""
    never_alone(monkeypatch)
    jobs = [job(run, people(run), seed=3) for run in range(2)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


@pytest.mark.parametrize("users", [40, 55])
def test_what_is_random_on_devices_goes_by_users_own_numbers(users, monkeypatch) -> None:
    """Not by their places among the users of all populations."""
    never_alone(monkeypatch)
    own = [people(0), people(1, users=users)]
    settings = dict(job(0, own[0], samples_per_user=2).settings)
    jobs = [Job(made("dropout", run), own[run], settings | {"seed": 3}) for run in range(2)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


def test_all_of_a_method_may_differ(monkeypatch) -> None:
    never_alone(monkeypatch)
    data = people()
    methods = [
        fpfl.OneGradient(damping=1.0 + r, multiplier_lr=0.1 * (r + 1), decay=0.9 + 0.02 * r,
                         tolerance=0.01 * r, spread=0.2 + 0.1 * r, low=0.1 * r, high=5.0 + r)
        for r in range(4)
    ]  # fmt: skip
    jobs = [job(run, data, method=method) for run, method in enumerate(methods)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


def test_local_steps_of_several_runs(monkeypatch) -> None:
    never_alone(monkeypatch)
    data = people()
    local = fpfl.FederatedAveraging(3, 0.1)
    more = {"local": local, "constraint": None, "method": None, "privacy": None, "clip": 1.0}
    jobs = [job(run, data, **(more | {"noise_seed": None})) for run in range(3)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


@pytest.mark.parametrize("rule", ["best", "last", "average"])
def test_a_run_that_diverges_leaves_the_others_alone(rule, monkeypatch) -> None:
    """And keeps its last good model."""
    never_alone(monkeypatch)
    data = people()
    plain = {"privacy": None, "noise_seed": None, "method": fpfl.MMDM(), "selection": rule}
    rates = [0.1, 1e30, 0.2, 3e37]
    jobs = [job(run, data, learning_rate=rate, **plain) for run, rate in enumerate(rates)]
    found = together(jobs)
    monkeypatch.undo()
    ended = []
    for one, run in zip(jobs, found, strict=True):
        single = alone(one)
        alike(run, single)
        ended.append(run.stopped is not None)
    assert ended == [False, True, False, True]


@pytest.mark.parametrize("rule", ["best", "average"])
@pytest.mark.parametrize("window", [1, 3])
def test_what_a_diverged_run_had_chosen_stays(rule, window, monkeypatch) -> None:
    """Where it diverges when there is something to choose from."""

    class Late(torch.optim.SGD):
        def step(self, closure=None) -> None:
            self.rounds = getattr(self, "rounds", 0) + 1
            if self.rounds == 7:
                self.param_groups[0]["lr"] = math.inf
            super().step()

    never_alone(monkeypatch)
    plain = {"privacy": None, "noise_seed": None, "method": fpfl.MMDM(), "selection": rule}
    plain["selection_window"] = window if rule == "best" else 1
    kinds, data = [Late, torch.optim.SGD, Late, Late], people()
    jobs = [
        job(run, data, optimizer=lambda w, kind=kind: kind(w, lr=0.2), **plain)
        for run, kind in enumerate(kinds)
    ]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))
    assert [len(run.history) for run in found] == [6, 8, 6, 6]


APART = {
    "limit": [{"samples_per_user": 1}, {"samples_per_user": None}],
    "cohort": [{"cohort": 10}, {"cohort": 20}],
    "precision": [{"precision": "bf16"}, {"precision": "float32"}],
    "window": [{"selection": "best", "selection_window": each} for each in (1, 4)],
    "surrogate": [{"method": fpfl.OneGradient(surrogate=each)} for each in ("loss", "rate")],
    "constraint": [{"constraint": each("sex")} for each in (fpfl.fnr_parity, fpfl.accuracy_parity)],
    "groups": [{"constraint": fpfl.fnr_parity(each)} for each in ("sex", "race")],
    "blocks": [
        {"privacy": fpfl.Privacy(noise_multiplier=0.5, clip=fpfl.Clipping(0.3, **more))}
        for more in ({}, {"counts": 2.0})
    ],
    "steps": [
        {
            "local": fpfl.FederatedAveraging(steps, 0.3),
            "constraint": None, "method": None, "privacy": None, "noise_seed": None,
        }
        for steps in (1, 4)
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", APART)
def test_what_all_runs_of_a_group_share_is_the_same_in_them(kind) -> None:
    data = people(mean=6.0)
    jobs = [job(0, data, **each) for each in APART[kind]]
    for one, run in zip(jobs, together(jobs), strict=True):
        single = alone(one)
        assert run.warnings == single.warnings
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, single.model.state_dict()[name])


def test_a_bad_sample_is_its_users_alone() -> None:
    data = people()
    bad = replace(data, features=data.features.clone(), checked=False)
    bad.features[5] = math.nan
    jobs = [job(run, bad) for run in range(3)]
    for one, run in zip(jobs, together(jobs), strict=True):
        alike(run, alone(one))


def test_trainings_of_different_shapes_are_not_mixed() -> None:
    data = people()
    jobs = [
        job(0, data),
        job(1, data, rounds=5),
        job(2, data),
        job(3, data, privacy=None, noise_seed=None, method=None),
        Job(made("linear", 0), data, dict(job(0, data).settings)),
        job(4, data, rounds=5),
    ]
    seen: list[tuple[tuple[int, ...], int]] = []
    found = dict(trained(jobs, watch=lambda runs, t: seen.append((tuple(runs), t))))
    assert sorted(found) == list(range(6))
    assert ((0, 2), 8) in seen
    assert ((1, 4 + 1), 5) in seen or ((1, 5), 5) in seen
    for number, one in enumerate(jobs):
        single = alone(one)
        if found[number].warnings[:1] != single.warnings[:1]:
            alike(found[number], single)
        assert len(found[number].history) == len(single.history)


def test_groups_are_cut_to_the_memory() -> None:
    data = people()
    jobs = [job(run, data, rounds=4) for run in range(5)]
    groups: set[tuple[int, ...]] = set()
    layout = prepare(jobs[0].model, data, **jobs[0].settings).spec.layout
    memory = 2 * (8 * batch.COPIES * layout.size + 4 * batch.FIGURES * 16)
    found = dict(trained(jobs, memory=memory, watch=lambda runs, _: groups.add(tuple(runs))))
    assert len(groups) >= 2
    assert max(map(len, groups)) < 5
    for number, one in enumerate(jobs):
        alike(found[number], alone(one)) if len(groups) < 5 else None


def test_a_group_says_that_it_is_a_simulation() -> None:
    data = people()
    found = together([job(run, data) for run in range(2)])
    for run in found:
        assert "trained on its own" in run.warnings[0]
        assert "2 trainings" in run.warnings[0]


def test_what_belongs_to_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="folder, ledger belong to a run"):
        job(0, people(), folder="x", ledger="y")


def test_the_systems_noise_is_each_runs_own(monkeypatch) -> None:
    never_alone(monkeypatch)
    data = people()
    same = {"seed": 1, "noise_seed": None}
    one, other = together([Job(made("perceptron", 0), data, job(0, data, **same).settings)] * 2)
    assert not torch.equal(one.model[0].weight, other.model[0].weight)
    assert one.privacy.epsilon is not None


class Printed(nn.Module):
    """A model whose text does not say what it does."""

    def __init__(self, does, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.does = does
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.does(self.first(x))) * self.scale


def hooked(times: float) -> nn.Module:
    model = MODELS["perceptron"]()
    model[1].register_forward_hook(lambda layer, given, output: output * times)
    return model


def attention(heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, heads, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Linear(1, 4), layer, nn.Flatten(), nn.Linear(20, 1)
    )


OF_ONE_TEXT = {
    "activation": lambda run: Printed([torch.relu, torch.tanh][run]),
    "function": lambda run: Printed(lambda x: torch.relu(x) * (run + 1)),
    "scale": lambda run: Printed(torch.relu, 1.0 + 3.0 * run),
    "hook": lambda run: hooked(1.0 + 2.0 * run),
    "heads": lambda run: attention(1 + run),
}


@pytest.mark.parametrize("kind", OF_ONE_TEXT)
def test_models_of_one_text_that_do_other_things_are_not_mixed(kind) -> None:
    data = people()
    jobs = []
    for run in range(2):
        torch.manual_seed(run)
        plain = {"privacy": None, "noise_seed": None, "method": fpfl.MMDM()}
        jobs.append(Job(OF_ONE_TEXT[kind](run), data, dict(job(run, data, **plain).settings)))
    for one, run in zip(jobs, together(jobs), strict=True):
        single = alone(one)
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, single.model.state_dict()[name])


def test_models_that_are_alike_are_one_group(monkeypatch) -> None:
    """Made anew, with functions of their own, and with settings that are not tensors."""
    never_alone(monkeypatch)
    data = people()
    jobs = [
        Job(Printed(lambda x: torch.relu(x) * 2.0), data, dict(job(run, data).settings))
        for run in range(2)
    ]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


def test_features_of_other_types_are_not_mixed() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x if x.is_floating_point() else x.float() / 255)

    real = people(0)
    whole = replace(people(1), features=(people(1).features.abs() * 50).to(torch.uint8))
    jobs = []
    for run, data in enumerate((real, whole)):
        torch.manual_seed(run)
        jobs.append(Job(Counted(), data, dict(job(run, data).settings)))
    for one, run in zip(jobs, together(jobs), strict=True):
        assert torch.equal(run.model.layer.weight, alone(one).model.layer.weight)


class Scaled:
    """A method of one's own that is MMDM, times a number."""

    def __init__(self, times: float) -> None:
        self.times = times

    def update(self, state, totals, tolerance):
        state, direction = fpfl.MMDM(multiplier_lr=0.1).update(state, totals, tolerance)
        return state, direction * self.times


@dataclass(frozen=True, slots=True)
class Slotted:
    times: float

    def update(self, state, totals, tolerance):
        return Scaled(self.times).update(state, totals, tolerance)


@dataclass(frozen=True)
class Deciding:
    """By what was measured, and by its own number."""

    times: float

    def update(self, state, totals, tolerance):
        if self.times > 1.5 and float(totals.gap()) > 0.05:
            return Scaled(self.times).update(state, totals, tolerance)
        return Scaled(1.0).update(state, totals, tolerance)


@dataclass(frozen=True)
class Tensors:
    times: torch.Tensor

    def update(self, state, totals, tolerance):
        return Scaled(float(self.times - 1.0) * 1e5).update(state, totals, tolerance)


class Counting:
    """It remembers something outside its state."""

    def __init__(self, times: float) -> None:
        self.rounds = 0

    def update(self, state, totals, tolerance):
        self.rounds += 1
        return Scaled(1.0 / self.rounds).update(state, totals, tolerance)


@dataclass(frozen=True)
class Begun(fpfl.OneGradient):
    start: float = 0.0

    def begin(self, rates, groups, device):
        state = super().begin(rates, groups, device)
        return replace(state, multipliers=state.multipliers + self.start)


@dataclass(frozen=True)
class Marked(fpfl.methods.MethodState):
    seen: torch.Tensor
    rounds: torch.Tensor


@dataclass(frozen=True)
class Marking:
    """Its state has marks and counts beside fractions."""

    times: float
    surrogate = "loss"

    def begin(self, rates, groups, device):
        marks = torch.zeros(rates, groups, dtype=torch.bool)
        return Marked(torch.zeros(rates, groups), marks, torch.zeros((), dtype=torch.int64))

    def weights(self, state, normaliser, tolerance):
        everybody = state.multipliers.sum(dim=1)
        return fpfl.fairness.totals.Weights(state.multipliers, everybody, 0.0, 5.0)

    def update(self, state, totals, tolerance):
        moved = (
            state.multipliers + self.times * 0.1 * totals.differences().nan_to_num() * state.seen
        )
        marked = Marked(moved, ~state.seen, state.rounds + 1)
        return marked, totals.loss_gradient / totals.normaliser


OWN = {
    "plain class": Scaled,
    "slots": Slotted,
    "decisions": Deciding,
    "tensors": lambda times: Tensors(torch.tensor(1.0 + 1e-5 * times)),
    "memory": Counting,
    "beginning": lambda times: Begun(start=times, spread=None),
    "marks": Marking,
}


@pytest.mark.parametrize("kind", OWN)
def test_methods_of_ones_own_do_what_they_do_alone(kind) -> None:
    """Where they cannot be computed side by side, they are computed alone."""
    data = people()

    def jobs() -> list[Job]:
        plain = {"privacy": None, "noise_seed": None}
        return [job(run, data, **plain, method=OWN[kind](1.0 + run)) for run in range(2)]

    for one, run in zip(jobs(), together(jobs()), strict=True):
        single = alone(one)
        for name, value in run.model.state_dict().items():
            torch.testing.assert_close(value, single.model.state_dict()[name])


def test_an_optimiser_may_put_new_numbers_in_place_of_a_parameters(monkeypatch) -> None:
    class Replacing(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})

        def step(self, closure=None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad

    never_alone(monkeypatch)
    data = people()
    jobs = [job(run, data, optimizer=Replacing) for run in range(2)]
    found = together(jobs)
    monkeypatch.undo()
    for one, run in zip(jobs, found, strict=True):
        alike(run, alone(one))


def test_rates_of_one_name_that_count_other_things_are_not_mixed() -> None:
    class Of:
        def __init__(self, one: int) -> None:
            self.one = one

        def __repr__(self) -> str:
            return "of a class"

        def __call__(self, predictions, labels):
            return (predictions != self.one).float()

    def own(one: int) -> fpfl.Constraint:
        rate = fpfl.Rate(
            "own",
            condition=lambda labels: labels >= 0,
            true=Of(one),
            surrogate=lambda scores, labels: 1.0 - scores[..., one],
        )
        return fpfl.Constraint((rate,), ("sex",))

    data = people()
    jobs = [job(run, data, constraint=own(run)) for run in range(2)]
    for one, run in zip(jobs, together(jobs), strict=True):
        single = alone(one)
        for name, value in run.model.state_dict().items():
            assert torch.equal(value, single.model.state_dict()[name])


def test_users_of_one_run_in_several_products_are_added_up() -> None:
    """512 users and more of one run, in a chunk where another run has none."""
    users = 600
    gradients = FactoredGradients(
        (), torch.ones(1, users), torch.ones(users, 0), np.ones(users, dtype=np.int64), 1,
        runs=ByRun(2, torch.zeros(users, dtype=torch.int64)),
    )  # fmt: skip
    assert [run for run, _ in gradients._parts] == [0, 0]
    assert gradients._by_run(torch.tensor([[3], [4]])).tolist() == [[7], [0]]
