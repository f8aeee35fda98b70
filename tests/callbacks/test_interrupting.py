"""Ctrl-C: the round is finished, nothing that was charged is lost, and the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import make_population

import fpfl
from fpfl.callbacks.interrupt import finishing_rounds
from fpfl.runs.folder import OpenRun
from fpfl.server.loop import Callback

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
SETTINGS = {
    "cohort": 20,
    "rounds": 12,
    "privacy": fpfl.Privacy(noise_multiplier=1.0, clip=1.0),
    "selection": "last",
}


def interrupt_in(round: int, times: int = 1) -> Callback:
    def press(event: fpfl.RoundEvent) -> None:
        if event.row["round"] == round:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return press


@pytest.mark.parametrize("times", [1, 2])
def test_a_round_that_was_charged_is_not_lost(
    times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    people, before = make_population(), signal.getsignal(signal.SIGINT)
    pressed = interrupt_in(5, times)
    with pytest.raises(KeyboardInterrupt), finishing_rounds(path) as last:
        fpfl.train(fpfl.mlp(5), people, folder=path, callbacks=[pressed, last], **SETTINGS)
    assert signal.getsignal(signal.SIGINT) is before
    assert f"fpfl resume {path}" in capsys.readouterr().err
    assert OpenRun(path).ledger.spent == 5
    run = fpfl.train(fpfl.mlp(5), people, folder=fpfl.RunFolder(path, resume=True), **SETTINGS)
    assert [row["round"] for row in run.history] == list(range(1, 13))
    assert OpenRun(path).ledger.spent == 12
    assert run.stopped is None


def test_it_is_too_late_in_the_last_round(tmp_path: Path) -> None:
    with finishing_rounds(tmp_path / "run") as last:
        pressed = interrupt_in(12)
        run = fpfl.train(fpfl.mlp(5), make_population(), callbacks=[pressed, last], **SETTINGS)
    assert len(run.history) == 12
