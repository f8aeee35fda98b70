"""The choice: who is chosen, what cannot be told apart, and what an interval is of."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpfl
from fpfl.sweeps.choice import averaged, students_t
from fpfl.sweeps.picture import picture

Row = dict[str, Any]


def row(
    number: int, rate: float, seed: int, accuracy: float, gap: float | None, *, arm: float = 0.01
) -> Row:
    ends = {} if gap is None else {"gap_low": max(0.0, gap - arm), "gap_high": gap + arm}
    return {
        "run": number,
        "learning_rate": rate,
        "seed": seed,
        "accuracy": accuracy,
        "accuracy_low": accuracy - arm,
        "accuracy_high": accuracy + arm,
        "gap": gap,
        **ends,
        "tolerance": 0.05,
        "confidence": 0.95,
    }


def test_the_best_within_the_tolerance_is_chosen() -> None:
    """A better accuracy outside the tolerance does not count."""
    rows = [row(0, 0.1, 0, 0.80, 0.01), row(1, 0.2, 0, 0.90, 0.20), row(2, 0.3, 0, 0.85, 0.02)]
    choice = fpfl.choose(rows)
    assert choice.best.settings == {"learning_rate": 0.3}
    assert (choice.met, choice.best.runs, choice.alike) == (True, (2,), ())
    assert "Chosen of 3: learning_rate = 0.3" in str(choice)
    assert fpfl.choose(rows, tolerance=0.5).best.settings == {"learning_rate": 0.2}


def test_where_none_is_within_the_smallest_gap_is_chosen_and_said() -> None:
    rows = [row(0, 0.1, 0, 0.9, 0.30), row(1, 0.2, 0, 0.7, 0.20), row(2, 0.3, 0, 0.6, 0.21)]
    choice = fpfl.choose(rows)
    assert (choice.met, choice.best.runs) == (False, (1,))
    assert [each.runs for each in choice.alike] == [(2,)]
    assert "No setting has a held-out gap within α = 0.05" in str(choice)


def test_the_table_of_settings_has_all_of_them_the_best_first() -> None:
    rows = [row(0, 0.1, 0, 0.80, 0.01), row(1, 0.2, 0, 0.90, 0.20), row(2, 0.3, 0, 0.85, 0.02)]
    rows[0]["learning_rate"], rows[1]["learning_rate"] = {"kind": "A|B", "x": 1.0}, None
    head, _, first, second, third = fpfl.choose(rows).markdown().splitlines()
    assert head == "|  | learning_rate | runs | held-out accuracy | gap | within |"
    assert first == (
        "| **chosen** | 0.3 | 1 | 0.8500 [0.8400, 0.8600] | 0.0200 [0.0100, 0.0300] | yes |"
    )
    assert second.startswith("|  | A/B(x=1) | 1 |")
    assert third.endswith("| no |")


def test_seeds_are_averaged_over() -> None:
    """One lucky seed is no better setting."""
    rows = [row(0, 0.1, 0, 0.95, 0.0), row(1, 0.1, 1, 0.55, 0.0)]
    rows += [row(2, 0.2, 0, 0.80, 0.0), row(3, 0.2, 1, 0.80, 0.0)]
    choice = fpfl.choose(rows)
    assert choice.best.runs == (2, 3)
    assert choice.best.score.value == pytest.approx(0.80)
    assert choice.seeds == 2
    assert "between 2 seeds" in str(choice)
    assert fpfl.choose(rows, over=()).best.settings == {"learning_rate": 0.1, "seed": 0}
    assert "with one seed" in str(fpfl.choose(rows[:1]))


def test_who_cannot_be_told_apart() -> None:
    rows = [row(0, 0.1, 0, 0.80, 0.0), row(1, 0.2, 0, 0.79, 0.0), row(2, 0.3, 0, 0.70, 0.0)]
    choice = fpfl.choose(rows)
    assert [each.runs for each in choice.alike] == [(1,)]
    doubtful = fpfl.choose([*rows, row(3, 0.4, 0, 0.99, 0.055)])
    assert [each.runs for each in doubtful.doubtful] == [(3,)]
    assert "chance may have put above α: learning_rate = 0.4" in str(doubtful)


SAID = "the model predicts 'no' for everybody: accuracy 0.950 is that of always saying 'no'"


def collapsed(*args: Any) -> Row:
    return row(*args) | {"collapsed": SAID, "balanced_accuracy": 0.5, "unbalanced": True}


def test_a_collapsed_model_is_not_chosen_while_another_is_within() -> None:
    """It has the best accuracy and no gap; one seed of two is enough."""
    rows = [collapsed(0, 0.1, 0, 0.95, 0.0), row(1, 0.2, 0, 0.80, 0.02), row(2, 0.3, 0, 0.99, 0.2)]
    choice = fpfl.choose(rows)
    assert (choice.met, choice.best.runs, choice.alike) == (True, (1,), ())
    assert "Passed over, for a model of theirs has collapsed: learning_rate = 0.1." in str(choice)
    assert [each.runs for each in choice.settings] == [(1,), (0,), (2,)]
    assert "| collapsed | 0.1 | 1 |" in choice.markdown()
    more = [*rows, row(3, 0.1, 1, 0.95, 0.0), row(4, 0.2, 1, 0.80, 0.02)]
    assert fpfl.choose(more).best.runs == (1, 4)
    assert fpfl.choose(more).settings[1].collapsed == 1


def test_where_all_within_have_collapsed_it_is_said() -> None:
    rows = [collapsed(0, 0.1, 0, 0.95, 0.0), row(1, 0.2, 0, 0.80, 0.30)]
    choice = fpfl.choose(rows)
    assert (choice.met, choice.best.runs) == (True, (0,))
    assert "COLLAPSED: 1 of its 1 runs" in str(choice)
    assert "settings without one are outside α" in str(choice)
    assert "**chosen** (collapsed)" in choice.markdown()
    both = fpfl.choose([rows[0], collapsed(1, 0.2, 0, 0.9, 0.0)])
    assert "and so did all others" in str(both)
    assert "apart. Do not use it" in str(fpfl.choose(rows[:1]))


def test_where_none_is_within_a_collapsed_model_comes_after_the_others() -> None:
    rows = [collapsed(0, 0.1, 0, 0.95, 0.10), row(1, 0.2, 0, 0.80, 0.30)]
    choice = fpfl.choose(rows)
    assert (choice.met, choice.best.runs) == (False, (1,))
    assert "Passed over" in str(choice)


def test_without_a_tolerance_a_collapsed_model_comes_last() -> None:
    rows = [row(0, 0.1, 0, 0.80, None), row(1, 0.2, 0, 0.95, None) | {"collapsed": SAID}]
    for each in rows:
        del each["tolerance"]
    assert fpfl.choose(rows).best.runs == (0,)


def test_without_a_constraint_accuracy_decides() -> None:
    rows = [row(0, 0.1, 0, 0.80, None), row(1, 0.2, 0, 0.70, None)]
    choice = fpfl.choose(rows)
    assert (choice.best.runs, choice.best.gap, choice.met) == ((0,), None, None)


def test_a_gap_that_is_not_known_is_not_within() -> None:
    """Silence is not fairness: a group without a sample may be treated in any way."""
    rows = [row(0, 0.1, 0, 0.80, math.nan), row(1, 0.2, 0, 0.70, 0.01)]
    rows[0]["gap"] = None
    assert fpfl.choose(rows).best.runs == (1,)


def test_of_regressions_the_smallest_error_is_chosen() -> None:
    rows = [row(0, 0.1, 0, 0.30, 0.01), row(1, 0.2, 0, 0.20, 0.01)]
    for each in rows:
        for name in ("", "_low", "_high"):
            each[f"error{name}"] = each.pop(f"accuracy{name}")
    choice = fpfl.choose(rows)
    assert (choice.best.runs, choice.measure) == ((1,), "error")


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose by"):
        fpfl.choose([{"run": 0, "accuracy": None}])
    rows = [row(0, 0.1, 0, 0.8, 0.0), row(1, 0.2, 0, 0.8, 0.0) | {"tolerance": 0.1}]
    with pytest.raises(ValueError, match=r"different tolerances \(0.05, 0.1\)"):
        fpfl.choose(rows)
    with pytest.raises(ValueError, match="the tolerance is 2"):
        fpfl.choose(rows, tolerance=2.0)


ROWS = st.lists(
    st.builds(
        row,
        st.integers(0, 99),
        st.sampled_from([0.1, 0.2, 0.3]),
        st.integers(0, 4),
        st.floats(0.1, 0.9),
        st.one_of(st.none(), st.floats(0.0, 0.3)),
        arm=st.floats(0.0, 0.05),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS)
def test_the_choice_holds_what_it_says(rows: list[Row]) -> None:
    """Nobody within the tolerance is better; all rows are somewhere, once; JSON holds it."""
    choice = fpfl.choose(rows)
    judged = [each for each in choice.settings if each.within is not False]
    if judged:
        assert choice.best.score.value == max(each.score.value for each in judged)
    assert sorted(n for each in choice.settings for n in each.runs) == sorted(
        each["run"] for each in rows
    )
    assert choice.best not in choice.alike
    for each in choice.settings:
        assert not each.score.value < each.score.low
        assert not each.score.value > each.score.high
    assert json.loads(json.dumps(choice.as_dict(), allow_nan=False))["words"] == choice.lines()


@given(ROWS, st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[Row], random: Any) -> None:
    shuffled = rows[:]
    random.shuffle(shuffled)
    first, second = fpfl.choose(rows), fpfl.choose(shuffled)
    assert first.best.score.value == pytest.approx(second.best.score.value)
    assert first.met == second.met


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30])
def test_students_t(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="the reference")
    for confidence in (0.5, 0.9, 0.95, 0.999):
        expected = stats.t.ppf((1 + confidence) / 2, degrees)
        assert students_t(confidence, degrees) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_a_mean_covers_it() -> None:
    """Seeds alone, 95% of 4,000: a binomial leaves 3,800 ± 4.9 × 13.8 with a chance below 10⁻⁶."""
    rng = np.random.default_rng(0)
    hits = 0
    for values in rng.normal(0.5, 0.01, size=(4000, 4)):
        found = averaged([(v, v, v) for v in values], 0.95)
        hits += found.low <= 0.5 <= found.high
    assert 3732 <= hits <= 3868


def test_more_seeds_do_not_narrow_what_users_widen() -> None:
    """All runs are judged by the same users."""
    one = averaged([(0.5, 0.4, 0.6)], 0.95)
    many = averaged([(0.5, 0.4, 0.6)] * 9, 0.95)
    assert (one.low, one.high) == pytest.approx((0.4, 0.6))
    assert (many.low, many.high) == pytest.approx((0.4, 0.6))


def test_there_is_a_picture() -> None:
    rows = [row(n, 0.1 * n, 0, 0.7 + 0.02 * n, 0.01 * n) for n in range(9)]
    for some in (rows, rows[:1], [each | {"gap": None} for each in rows]):
        assert picture(fpfl.choose(some)).startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        picture(fpfl.choose([row(0, 0.1, 0, 0.8, 0.0)]))
