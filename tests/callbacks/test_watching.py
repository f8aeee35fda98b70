"""While it runs: who is told what and when, ε so far, bars, lines, and how noisy totals are."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_population
from federated import Memory, agreement
from killing import settings
from rich.console import Console

import fpfl
from fpfl.callbacks import progress as released
from fpfl.callbacks import progress as shown
from fpfl.callbacks.explain import DOMINATED, NO_NOISE, WEAK, Heard, explain_totals, heard
from fpfl.callbacks.progress import MISSING, Progress, fitting, progress
from fpfl.federation.rounds import federate
from fpfl.privacy import accounting
from fpfl.privacy.filter import Mechanism
from fpfl.privacy.plan import Block, PrivacyPlan
from fpfl.privacy.spending import Spending
from fpfl.privacy.statement import round_up
from fpfl.server.events import Training, Watching
from fpfl.server.loop import RoundEvent, StopTraining
from fpfl.server.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore::fpfl.FpflWarning")
ROUNDS = 12


class Diary:
    """A callback that writes down what it is told."""

    def __init__(self, **wishes: Any) -> None:
        self.said: list[str] = []
        self.training: Training | None = None
        self.events: list[RoundEvent] = []
        self.run: fpfl.Run | None = None
        self.error: BaseException | None = None
        self.wishes = wishes

    def _note(self, what: str) -> None:
        self.said.append(what)
        if what in self.wishes:
            raise self.wishes[what]

    def begin(self, training: Training) -> None:
        self.training = training
        self._note("begin")

    def __call__(self, event: RoundEvent) -> None:
        self.events.append(event)
        self._note(f"round{event.row['round']}")

    def end(self, run: fpfl.Run) -> None:
        self.run = run
        self._note("end")

    def failed(self, error: BaseException) -> None:
        self.error = error
        self._note("failed")


class BrokenError(Exception):
    """What a callback of one's own raises."""


def train(*callbacks: Any, folder: Any = None, **others: Any) -> fpfl.Run:
    given = settings(5, rounds=ROUNDS) | others
    model = given.pop("model", None) or fpfl.mlp(5, (4,), seed=0)
    data = given.pop("data", None) or make_population()
    return fpfl.train(model, data, folder=folder, callbacks=list(callbacks), **given)


def rounds(first: int, last: int) -> list[str]:
    return [f"round{t}" for t in range(first, last + 1)]


def terminal(width: int = 200, **how: Any) -> Console:
    how = {"force_terminal": True, "_environ": {"TERM": "xterm"}} | how
    return Console(file=io.StringIO(), width=width, **how)


def text(console: Console) -> str:
    """What was written, without escape sequences; every picture of a bar is a line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return plain.replace("\r", "\n")


# --- who is told what, and when -----------------------------------------------------------------


def test_callbacks_are_told_of_beginning_rounds_and_end(tmp_path: Path) -> None:
    diary, plain = Diary(), []
    run = train(diary, plain.append, folder=tmp_path / "run")
    assert diary.said == ["begin", *rounds(1, ROUNDS), "end"]
    assert len(plain) == ROUNDS
    assert diary.run is run
    training = diary.training
    assert training is not None
    assert (training.first, training.fresh, training.rounds) == (1, 1, ROUNDS)
    assert training.settings == run.settings
    json.dumps(training.settings)
    assert [part.name for part in training.parts] == list(training.layout.slices)
    assert sum(part.size for part in training.parts) == training.layout.size
    assert training.plan is not None
    for part in training.parts:
        assert part.block is not None
        # A little more than the plan's, for rounding to the grid of the noise.
        assert part.noise == pytest.approx(training.plan.noise_stddev(part.block), rel=2e-3)
        assert part.noise >= training.plan.noise_stddev(part.block)


def test_the_folder_is_whole_and_free_when_the_end_is_told(tmp_path: Path) -> None:
    found = []

    class Look:
        def __call__(self, event: RoundEvent) -> None:
            pass

        def end(self, run: fpfl.Run) -> None:
            found.append((tmp_path / "run" / "result.json").exists())
            # Nobody holds it any more: it can be gone on with.
            where = fpfl.RunFolder(tmp_path / "run", resume=True)
            found.append(train(folder=where).history == run.history)

    train(Look(), folder=tmp_path / "run")
    assert found == [True, True]


def test_a_resumed_run_says_where_it_begins(tmp_path: Path) -> None:
    first, second = Diary(round7=BrokenError("no more")), Diary()
    with pytest.raises(BrokenError):
        train(first, folder=fpfl.RunFolder(tmp_path / "run", checkpoint_every=5))
    assert first.said == ["begin", *rounds(1, 7), "failed"]
    assert isinstance(first.error, BrokenError)
    where = fpfl.RunFolder(tmp_path / "run", resume=True)
    whole = train(second, folder=where)
    assert second.said == ["begin", *rounds(6, ROUNDS), "end"]
    assert second.training is not None
    assert (second.training.first, second.training.fresh) == (6, 8)
    assert whole.history == train().history


def test_a_federation_tells_the_same() -> None:
    agreed = agreement(rounds=2)
    courier, diary = Memory(agreed), Diary()
    run = federate(agreed, courier, courier.key, callbacks=[diary])
    assert diary.said == ["begin", "round1", "round2", "end"]
    assert diary.run is run
    assert diary.training is not None
    assert diary.training.plan is agreed.plan
    place = agreed.layout.slices["n"].start
    assert diary.training.parts[2].name == "n"
    assert diary.training.parts[2].noise == float(agreed.noise_stddev[place])
    spent = diary.training.spending
    assert spent is not None
    assert agreed.plan is not None
    found = spent.after(2)
    assert found is not None
    assert found.epsilon == found.total == agreed.plan.epsilon


@pytest.mark.parametrize("moment", ["begin", "round3", "end"])
def test_what_a_callback_raises_is_raised(moment: str, tmp_path: Path) -> None:
    before, broken, after = Diary(), Diary(**{moment: BrokenError(moment)}), Diary()
    with pytest.raises(BrokenError, match=moment):
        train(before, broken, after, folder=tmp_path / "run")
    last = "end" if moment == "end" else "failed"
    assert before.said[-1] == broken.said[-1] == last
    # One that was never told of a beginning is not told of an end.
    told = {"begin": [], "round3": ["begin", *rounds(1, 2), "failed"], "end": before.said}
    assert after.said == told[moment]
    if moment == "end":
        assert (tmp_path / "run" / "result.json").exists()
    else:
        # The folder can be gone on with, and comes to the same.
        run = train(folder=fpfl.RunFolder(tmp_path / "run", resume=True))
        assert run.history == train().history


def test_a_second_error_is_a_note_on_the_first() -> None:
    one = Diary(round2=BrokenError("first"), failed=ValueError("second"))
    two = Diary()
    with pytest.raises(BrokenError, match="first") as caught:
        train(one, two)
    assert any("second" in note for note in caught.value.__notes__)
    assert two.said[-1] == "failed"


def test_an_interruption_is_told_too() -> None:
    diary = Diary(round2=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(diary)
    assert diary.said[-1] == "failed"


def test_a_callback_ends_training_and_epsilon_stays(tmp_path: Path) -> None:
    stopper, other = Diary(round4=StopTraining("close enough")), Diary()
    run = train(stopper, other, folder=tmp_path / "run")
    assert len(run.history) == 4
    assert run.stopped is not None
    assert "after round 4 of 12: close enough" in run.stopped
    # The others have seen the round, and all are told of the end.
    assert stopper.said == other.said == ["begin", *rounds(1, 4), "end"]
    whole = train()
    assert run.privacy is not None
    assert whole.privacy is not None
    assert run.privacy.epsilon == whole.privacy.epsilon
    assert run.privacy.rounds == ROUNDS
    again = train(folder=fpfl.RunFolder(tmp_path / "run", resume=True))
    assert again.history == whole.history


def test_processes_without_callbacks_stop_with_the_first(monkeypatch) -> None:
    event = RoundEvent({"round": 1}, torch.zeros(1), 2, torch.zeros(1))
    sent = []

    def tell(self: Ranks, numbers: list[int]) -> list[int]:
        sent.append(numbers)
        return [1]

    monkeypatch.setattr(Ranks, "numbers_from_first", tell)
    with pytest.raises(StopTraining):
        Watching((Diary(round1=StopTraining()),), Ranks(0, 2))(event)
    with pytest.raises(StopTraining):
        Watching((), Ranks(1, 2))(event)
    assert sent == [[1], [0]]


# --- ε so far -----------------------------------------------------------------------------------

PLANS = [
    {},
    {"neighbours": "add-remove"},
    {"neighbours": "replace-one"},
    {"max_participations": 3},
    {"real_population": 500},
    {"convention": "replace-one"},
    {"convention": "paper"},
    {"convention": "coins"},
    {"convention": "picked"},
]


def plan(T: int = 60, **others: Any) -> PrivacyPlan:
    given = {"population": 1000, "cohort": 20, "rounds": T, "noise_multiplier": 1.5}
    return PrivacyPlan(**given | {"blocks": [Block("joint", 1.0, 1.0)]} | others)


def honest(made: PrivacyPlan) -> float:
    return made.epsilon_honest if made.epsilon_real is None else made.epsilon_real


@pytest.mark.parametrize("others", PLANS, ids=lambda o: "-".join(map(str, o.values())) or "poisson")
def test_epsilon_so_far_is_a_bound_and_close(others: dict[str, Any]) -> None:
    T = 60
    made = plan(T, **others)
    spending = Spending(made)
    found = [spending.after(t) for t in range(1, T + 1)]
    total = honest(made)
    assert all(spent is not None and spent.total == total for spent in found)
    bounds = [spent.epsilon for spent in found if spent is not None]
    assert bounds[-1] == total
    assert bounds == sorted(bounds)
    # Of privacy losses on a grid, two computations agree to some parts in ten thousand.
    cheap = made.convention != "poisson"
    for t in range(1, T + 1) if cheap else (1, 15, 59):
        exact = honest(made.with_rounds(t))
        assert bounds[t - 1] >= exact * (1 - 1e-3)
        assert bounds[t - 1] <= exact + 0.2 * total
    assert len(spending.grid) <= 20


def test_epsilon_is_computed_at_a_few_rounds_only(monkeypatch) -> None:
    asked = []
    real = PrivacyPlan.with_rounds
    monkeypatch.setattr(
        PrivacyPlan, "with_rounds", lambda self, t: asked.append(t) or real(self, t)
    )
    spending = Spending(plan(1000, convention="coins"))
    assert not asked
    for t in range(1, 1001):
        spending.after(t)
    assert 0 < len(asked) == len(set(asked)) <= 20


@dataclass
class Charged:
    planned: int
    spent: int
    filter: None = None
    charges: dict[Mechanism, int] = field(default_factory=dict)


def test_rounds_that_were_charged_and_lost_count() -> None:
    made = plan(60, convention="coins")
    alone = Spending(made)
    assert Spending(made, Charged(60, 30)).after(7) == alone.after(30) != alone.after(7)
    assert Spending(made, Charged(60, 7)).after(7) == alone.after(7)
    # T is what was planned, also where fewer rounds are run.
    fewer = Spending(made.with_rounds(20), Charged(60, 20)).after(20)
    assert fewer == alone.after(20)
    assert fewer is not None
    assert fewer.total == honest(made)


def test_epsilon_so_far_counts_what_was_charged(tmp_path: Path) -> None:
    """Rounds that are seen again have all been charged before."""
    diary = Diary(round7=BrokenError())
    given = {"noise_seed": None, "folder": fpfl.RunFolder(tmp_path / "run", checkpoint_every=5)}
    with pytest.raises(BrokenError):
        train(diary, **given)
    second = Diary()
    train(second, **given | {"folder": fpfl.RunFolder(tmp_path / "run", resume=True)})
    assert second.training is not None
    spending = second.training.spending
    assert spending is not None
    assert spending.ledger is not None
    assert spending.ledger.spent == ROUNDS
    found = spending.after(6)
    assert found is not None
    assert found.epsilon == found.total


def test_epsilon_so_far_of_changed_settings_is_the_filters(tmp_path: Path) -> None:
    privacy = fpfl.Privacy(noise_multiplier=3.0, clip=1.0, budget=20.0)
    train(folder=tmp_path / "run", privacy=privacy, noise_seed=None, seed=None)
    diary = Diary()
    run = train(
        diary,
        folder=fpfl.RunFolder(tmp_path / "run", resume=True),
        privacy=privacy,
        noise_seed=None,
        seed=None,
        rounds=ROUNDS + 3,
    )
    assert diary.said == ["begin", *rounds(ROUNDS + 1, ROUNDS + 3), "end"]
    assert diary.training is not None
    assert diary.training.spending is not None
    found = diary.training.spending.after(ROUNDS + 3)
    assert found is not None
    assert run.privacy is not None
    assert (found.epsilon, found.total) == (run.privacy.filter_spent, 20.0)


def without_accountant(monkeypatch) -> None:
    def missing() -> None:
        raise accounting.MissingAccountantError("not here")

    monkeypatch.setattr(accounting, "_dp_accounting", missing)
    accounting._epsilon_poisson.cache_clear()


def test_without_an_accountant_one_line_says_so(monkeypatch) -> None:
    without_accountant(monkeypatch)
    out = Console(file=io.StringIO(), width=200)
    train(Progress(where=out))
    lines = text(out).splitlines()
    assert [MISSING in line for line in lines] == [True, *[False] * (len(lines) - 1)]
    assert not any("ε ≤" in line for line in lines)
    accounting._epsilon_poisson.cache_clear()


# --- bars and lines -----------------------------------------------------------------------------


def last_row(**others: Any) -> tuple[dict[str, Any], Training, str]:
    diary, out = Diary(), terminal()
    train(diary, Progress("Adult", where=out), **others)
    assert diary.training is not None
    drawn = [line for line in text(out).splitlines() if "12/12" in line]
    return diary.events[-1].row, diary.training, drawn[-1]


@pytest.mark.parametrize("method", [fpfl.MMDM(), fpfl.OneGradient()])
def test_a_bar_shows_what_was_released(method) -> None:
    private = fpfl.Privacy(noise_multiplier=0.3, clip=1.0)
    row, training, line = last_row(method=method, privacy=private, cohort=20)
    assert f"accuracy {row['accuracy']:.3f}" in line
    worst = released.worst(row)
    assert worst is not None
    assert row["gap"] == pytest.approx(worst.gap)
    assert f"gap {row['gap']:.3f} ({worst.rate} {worst.group})" in line
    assert ("averaged_gap" in row) == isinstance(method, fpfl.OneGradient)
    if "averaged_gap" in row:
        assert f"averaged gap {row['averaged_gap']:.3f}" in line
    assert training.plan is not None
    total = round_up(training.plan.epsilon)
    assert f"ε ≤ {total} of {total}" in line
    assert re.search(r"[\d.]+ (rounds/s|s/round)  0:00 left", line)
    assert line.startswith("Adult ")


def test_a_bar_without_constraint_and_privacy_shows_less() -> None:
    row, _, line = last_row(constraint=None, privacy=None, noise_seed=None, selection_window=1)
    assert f"accuracy {row['accuracy']:.3f}" in line
    assert "gap" not in line
    assert "ε" not in line


def test_a_regression_shows_its_score() -> None:
    data = make_population(classes=None)
    row, _, line = last_row(
        data=data,
        model=torch.nn.Sequential(fpfl.mlp(5, (4,), outputs=1, seed=0)),
        constraint=None,
        privacy=None,
        noise_seed=None,
        clip=1.0,
        selection_window=1,
    )
    assert f"score {row['accuracy']:.3f}" in line
    assert "accuracy" not in line


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
def test_a_bar_keeps_to_one_line(width: int) -> None:
    out = terminal(width)
    train(Progress(where=out), method=fpfl.OneGradient())
    lines = [line for line in text(out).splitlines() if line.strip()]
    assert all(len(line.rstrip()) <= width for line in lines)
    if width > 20:
        assert all(line.startswith("training") for line in lines)
        assert "12/12" in lines[-1]
    if width == 60:
        assert "gap" in lines[-1]


def test_the_most_important_parts_are_shown_last() -> None:
    parts = ["7/12", "accuracy 0.9", "gap 0.1 (FNR sex=a)", "averaged gap 0.2", "ε ≤ 1 of 2",
             "5 rounds/s", "0:01 left"]  # fmt: skip
    assert fitting(parts, 200) == "  ".join(parts)
    whole = "7/12  accuracy 0.9  gap 0.1  averaged gap 0.2  ε ≤ 1 of 2  5 rounds/s  0:01 left"
    assert fitting(parts, len(whole)) == whole
    assert fitting(parts, 70) == whole.replace("  5 rounds/s", "")
    assert fitting(parts, 50) == "7/12  accuracy 0.9  gap 0.1  ε ≤ 1 of 2  0:01 left"
    assert fitting(parts, 30) == "7/12  gap 0.1  ε ≤ 1 of 2"
    assert fitting(parts, 15) == "7/12  gap 0.1"
    assert fitting(parts, 3) == "7/1"
    assert fitting(parts, -2) == ""


def test_the_first_round_does_not_set_the_pace(monkeypatch) -> None:
    """It warms up; by the clock of the test it takes a minute, and each of the others a second."""
    clock = iter([0.0, 60.0, 61.0, 62.0, 63.0])
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=clock.__next__))
    pace = shown._Pace()
    found = []
    for t in range(5, 9):
        pace.round(t, shown.time.monotonic())
        found.append(pace.per_second())
    assert found == [1 / 60, 1.0, 1.0, 1.0]
    assert pace.elapsed(63.0) == 63.0


@pytest.mark.parametrize("T", [1, 5, 12, 103])
def test_lines_where_there_is_no_terminal(T: int) -> None:
    out, diary = Console(file=io.StringIO(), width=40), Diary()
    # Of an accountant that is quick.
    private = fpfl.Privacy(noise_multiplier=1.0, clip=1.0, convention="replace-one")
    train(diary, Progress("Adult", where=out), rounds=T, privacy=private)
    lines = text(out).splitlines()
    assert min(T, 4) <= len(lines) <= 10
    assert "\x1b" not in out.file.getvalue()  # type: ignore[attr-defined]
    rows = {event.row["round"]: event.row for event in diary.events}
    for line in lines:
        found = re.match(rf"Adult: round (\d+) of {T}, ", line)
        assert found
        row = rows[int(found[1])]
        if row["accuracy"] is not None:
            assert f"accuracy {row['accuracy']:.3f}" in line
        assert "gap " in line
        assert re.search(r"ε ≤ [\d.]+ of [\d.]+, ", line)
        assert line.endswith("elapsed")
    assert f"round {T} of {T}" in lines[-1]


def test_rounds_that_are_seen_again_are_not_shown_again(tmp_path: Path) -> None:
    where = fpfl.RunFolder(tmp_path / "run", checkpoint_every=5)
    with pytest.raises(BrokenError):
        train(Diary(round7=BrokenError()), folder=where)
    out = Console(file=io.StringIO(), width=40)
    train(Progress(where=out), folder=fpfl.RunFolder(tmp_path / "run", resume=True))
    assert re.findall(r"round (\d+) of", text(out)) == ["8", "10", "12"]


def test_other_encodings_and_terminals_do_not_fail(monkeypatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    train(
        fpfl.Explain(where=Console(file=stream, width=120)),
        Progress("naïve", where=Console(file=stream, width=120, force_terminal=True)),
        Progress("lines", where=Console(file=stream, width=120)),
    )
    stream.flush()
    written = raw.getvalue().decode("ascii")
    assert "eps <= " in written
    assert "na?ve" in written
    monkeypatch.setenv("NO_COLOR", "1")
    out = Console(file=io.StringIO(), width=80, force_terminal=True)
    train(Progress(where=out))
    assert "12/12" in text(out)
    dumb = terminal(_environ={"TERM": "dumb"})
    train(Progress(where=dumb))
    assert "round 12 of 12" in text(dumb)


def test_log_files_get_lines_even_where_colours_are_forced(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown.console.cache_clear()
    with progress("run", ROUNDS) as callback:
        train(callback)
    shown.console.cache_clear()
    written = capsys.readouterr().err
    assert "run: round 12 of 12" in written
    assert "\x1b" not in written


def test_a_bar_ends_when_training_fails() -> None:
    out = terminal()
    with pytest.raises(BrokenError):
        train(Progress(where=out), Diary(round3=BrokenError()))
    # The cursor is shown again.
    assert out.file.getvalue().rstrip().endswith("\x1b[?25h")  # type: ignore[attr-defined]


# --- how noisy each total is --------------------------------------------------------------------


def beginning(**others: Any) -> tuple[Training, list[RoundEvent]]:
    diary = Diary()
    train(diary, **others)
    assert diary.training is not None
    return diary.training, diary.events


@pytest.mark.parametrize("counts", [None, 1.0])
def test_explained_noise_is_the_plans(counts: float | None) -> None:
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(2.0, counts, selection=5.0))
    training, _ = beginning(privacy=privacy, cohort=20, normaliser="samples")
    plan = training.plan
    assert plan is not None
    found = {each.what: each for each in explain_totals(training)}
    assert len(found) == len(training.parts)
    for each in found.values():
        assert each.noise == pytest.approx(plan.noise_stddev(each.block), rel=2e-3)
        assert each.bound == {b.name: b.bound for b in plan.blocks}[each.block]
    p = training.layout.parameters
    gradient = found["sum of gradients"]
    assert gradient.most == 20 * 2.0
    assert f"{gradient.noise * math.sqrt(p):.4g} (s√p)" in gradient.words
    # N = m n̄, with three declared samples a user.
    assert f"{gradient.noise / 60:.3g} on every parameter once divided by N = 60" in gradient.words
    # Three samples each: the bound of 5 does not matter there, that of counts does.
    assert found["confusion table: class, predicted"].most == 20 * 3.0
    n = found["n': samples of a rate" if counts is None else "n' - F: the others"]
    assert n.most == 20 * (2.0 if counts is None else 1.0)
    s = n.noise * (1.0 if counts is None else math.sqrt(2))
    assert training.count_noise == pytest.approx(s)
    assert f"dominated below {2 * s:,.4g} and clear from {20 * s:,.4g}" in n.words


def test_words_for_how_clear_a_count_is() -> None:
    def word(count: float) -> str:
        return Heard("FNR", "a", count, 3.0).word

    assert (DOMINATED, WEAK) == (2.0, 20.0)
    assert [word(n) for n in (-7.0, 5.9, 6.1, 59.0, 61.0)] == [
        "dominated", "dominated", "weak", "weak", "clear",
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [None, 1.0])
def test_how_far_noise_moves_a_rate(counts: float | None) -> None:
    """Against draws: counts as released, with the noise that the training has."""
    privacy = fpfl.Privacy(noise_multiplier=1.0, clip=fpfl.Clipping(2.0, counts))
    training, _ = beginning(privacy=privacy)
    F, n = 120.0, 400.0
    generator = torch.Generator().manual_seed(0)
    s = next(part.noise for part in training.parts if part.name == "n")
    one, two = torch.randn(2, 20_000, generator=generator, dtype=torch.float64) * s
    rate = (F + one) / (n + two if counts is None else n + one + two)
    row = {
        "counts": {"FNR": {"sex=Female": n, "sex=Male": 1.0}},
        "groups": {"FNR": {"sex=Female": F / n, "sex=Male": None}},
    }
    women, men = heard([row], training)
    assert women.noise == pytest.approx(
        float((two if counts is None else one + two).std()), rel=0.03
    )
    assert women.moves == pytest.approx(float(rate.std()), rel=0.03)
    assert (men.word, men.moves) == ("dominated", None)


def test_explain_says_how_clear_released_counts_are() -> None:
    out, diary = Console(file=io.StringIO(), width=150), Diary()
    train(fpfl.Explain(every=5, where=out), diary)
    written = text(out)
    assert "How noisy each total is" in written
    spans = re.findall(r"Released counts against their noise, rounds (\d+) to (\d+)", written)
    assert spans == [("1", "5"), ("6", "10"), ("11", "12")]
    training = diary.training
    assert training is not None
    for first, last in spans:
        rows = [event.row for event in diary.events[int(first) - 1 : int(last)]]
        for each in heard(rows, training):
            mean = sum(row["counts"]["FNR"][each.group] for row in rows) / len(rows)
            assert each.count == pytest.approx(mean)
            assert re.search(
                rf"{each.group} .*{each.count:,.1f} .*{each.ratio:.1f} .*{each.word}", written
            )


def test_explain_without_privacy_says_that_there_is_no_noise() -> None:
    out = Console(file=io.StringIO(), width=150)
    train(fpfl.Explain(where=out), privacy=None, noise_seed=None)
    assert text(out).strip() == NO_NOISE
    with pytest.raises(ValueError, match="every is 0"):
        fpfl.Explain(every=0)


def test_only_released_figures_are_shown(monkeypatch) -> None:
    """With the exact totals replaced after the noise is drawn, nothing that is shown changes."""
    import fpfl.server.simulation as simulation

    fixed = torch.Generator().manual_seed(3)
    vectors: dict[int, torch.Tensor] = {}

    def release(self, round, w, weights=None):
        if round not in vectors:
            vectors[round] = torch.rand(self.third_party.size, generator=fixed) * 40
        return vectors[round]

    monkeypatch.setattr(simulation.Simulation, "release", release)

    def written(seed: int) -> str:
        # Time is shown as well, and is not of the data: here a second passes whenever it is asked.
        clock = SimpleNamespace(monotonic=count().__next__)
        monkeypatch.setattr(shown, "time", clock)
        out = Console(file=io.StringIO(), width=150)
        train(fpfl.Explain(where=out), Progress(where=out), data=make_population(seed=seed))
        return text(out)

    assert written(1) == written(2)
    assert "accuracy" in written(1)
    assert "1.0 rounds/s" in written(1)
