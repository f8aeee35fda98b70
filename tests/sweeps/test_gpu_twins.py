"""What sweeps do on a GPU alone, done here: the same numbers."""

from __future__ import annotations

import pytest
import torch
from conftest import RACE, SEX, make_population

import fpfl
from fpfl.sweeps import release
from fpfl.sweeps.batch import Job, trained, tried_before_a_run
from fpfl.training.session import prepare
from fpfl.users import steady
from fpfl.users.passes import LayerPass
from fpfl.users.recorders import linear

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")


def runs() -> list[fpfl.Run]:
    data = make_population(40, mean=3.0, attributes=(SEX, RACE))
    jobs = [
        Job(
            fpfl.mlp(5, (7,), seed=run),
            data,
            {
                "cohort": 15,
                "rounds": 5,
                "constraint": fpfl.fnr_parity("sex"),
                "method": fpfl.OneGradient(),
                "privacy": fpfl.Privacy(noise_multiplier=0.5, clip=1.0),
                "seed": run,
                "noise_seed": run,
            },
        )
        for run in range(5)
    ]
    found = dict(trained(jobs))
    return [found[number] for number in range(5)]


def same(one: list[fpfl.Run], other: list[fpfl.Run]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_products_of_so_many_tiles_at_once(at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7 * 64, 5, generator=generator)
    weights = torch.randn(4, 5, 3, generator=generator)
    tiles = (0, 0, 1, 3, 3, 2, 0)
    wanted = torch.cat(
        [part @ weights[run] for part, run in zip(torch.split(rows, 64), tiles, strict=True)]
    )
    found = steady.product_in_tiles(rows, weights, tiles, at_once)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(steady.product_in_tiles(rows, weights, tiles, None), wanted)


def test_several_tiles_in_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = runs()
    asked = []

    def at_once(rows: torch.Tensor) -> int:
        asked.append(len(rows))
        return 2

    monkeypatch.setattr(linear, "_at_once", at_once)
    same(runs(), alone)
    assert asked


def test_cohorts_are_read_ahead_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, used = runs(), []
    real = release.ahead

    def ahead(items):
        used.append(True)
        return real(items)

    monkeypatch.setattr(release, "ahead", ahead)
    monkeypatch.setattr(release, "reads_ahead", lambda device: True)
    same(runs(), alone)
    assert used


def test_recordings_are_kept_where_graphs_replay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = runs()
    real = LayerPass.__init__
    kept = []

    class InPlace:
        """As a recorded graph does: every replay writes to the same memory."""

        def __init__(self, way: LayerPass) -> None:
            self.way, self.last = way, None

        def __call__(self, batch):
            found = self.way._record(batch)
            if self.last is not None and len(self.last.output) == len(found.output):
                for old, new in zip(self.last.tensors(), found.tensors(), strict=True):
                    old.copy_(new)
                kept.append(True)
                return self.last
            self.last = found
            return found

    def init(self, *args, **how):
        real(self, *args, **how)
        self.graphs = InPlace(self)
        for recorder in self.recorders:  # run by run, as models with other layers are
            monkeypatch.setattr(type(recorder), "laned", property(lambda _: False))

    monkeypatch.setattr(LayerPass, "__init__", init)
    same(runs(), alone)
    assert kept


@pytest.mark.parametrize(
    ("device", "seed", "private", "together"),
    [
        ("cpu", None, True, True),
        ("cuda", None, True, False),
        ("cuda", 3, True, True),
        ("cuda", None, False, True),
    ],
)
def test_real_noise_on_a_gpu_is_for_kernels_that_were_tried(
    device, seed, private, together
) -> None:
    data = make_population(40, mean=3.0, attributes=(SEX, RACE))
    privacy = fpfl.Privacy(noise_multiplier=0.5, clip=1.0) if private else None
    made = prepare(
        fpfl.mlp(5, (7,)), data, cohort=10, rounds=2, privacy=privacy,
        noise_seed=seed if private else None,
    )  # fmt: skip
    assert tried_before_a_run(torch.device(device), made.third_party) is together
