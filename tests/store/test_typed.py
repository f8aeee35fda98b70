"""What is written down is read back as what it was, or refused with a word on where and why."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpfl
from fpfl.heldout import PrivateEvaluation, evaluate_privately
from fpfl.privacy.plan import PrivacyPlan
from fpfl.privacy.settings import Clipping, Privacy
from fpfl.privacy.statement import PrivacyStatement
from fpfl.store.typed import TypedError, plain, read_json, typed


@dataclass(frozen=True)
class Inner:
    name: str
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Outer:
    number: int
    share: float
    word: Literal["a", "b"]
    inner: tuple[Inner, ...] = ()
    table: dict[str, dict[str, float | None]] = field(default_factory=dict)
    more: Any = None
    known: bool = False

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number is negative")


GOOD = {"number": 3, "share": 1, "word": "b",
        "inner": [{"name": "x", "ends": [0, 1.5]}],
        "table": {"r": {"g": None}}, "more": [1], "known": True,
        "from a later version": 7}  # fmt: skip


def test_it_is_what_it_was() -> None:
    found = typed(Outer, GOOD)
    inner = (Inner("x", (0.0, 1.5)),)
    assert found == Outer(3, 1.0, "b", inner, {"r": {"g": None}}, [1], known=True)
    assert isinstance(found.share, float)
    assert typed(Outer, json.loads(json.dumps(plain(found)))) == found


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"number": 3.0}, "it: number is 3.0; expected a whole number"),
        ({"number": True}, "it: number is True"),
        ({"number": -1}, "it: number is negative"),
        ({"number": 10**200}, "it: number"),
        ({"share": "1"}, "it: share is '1'; expected a number"),
        ({"share": None}, "it: share is None"),
        ({"share": math.inf}, "it: share is inf"),
        ({"word": "c"}, "it: word is 'c'; expected one of 'a', 'b'"),
        ({"known": 1}, "it: known is 1; expected true or false"),
        ({"inner": [{}]}, r"it: inner\[0\] has no 'name'"),
        ({"inner": [{"name": "x", "ends": [1]}]}, r"it: inner\[0\]: ends is \[1\]; expected 2"),
        ({"inner": {"name": "x"}}, "it: inner is .*expected a list"),
        ({"table": {"r": {"g": "x"}}}, "it: table: r: g is 'x'; expected a number"),
        ({"table": {"r": 3}}, "it: table: r is 3; expected a mapping"),
    ],
)
def test_what_is_something_else_is_refused(change: dict[str, Any], where: str) -> None:
    with pytest.raises(TypedError, match=f"^{where}"):
        typed(Outer, GOOD | change)


@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "number", "share", "word", "inner", "table", "name", "ends", "known"]), inner, max_size=4),
))  # fmt: skip
def test_anything_is_read_or_refused(value: Any) -> None:
    with suppress(TypedError):  # any other error is one of this module
        found = typed(Outer, value, nan=True)
        assert typed(Outer, plain(found), nan=True).number == found.number


def test_a_file_is_named(tmp_path) -> None:
    file = tmp_path / "x.json"
    for text in ("{", "[]", '{"a": "x"}', "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json is not what a run writes .*intact copy"):
            read_json(file, dict[str, int])
    with pytest.raises(ValueError, match=r"none\.json"):
        read_json(tmp_path / "none.json", dict[str, int])


@pytest.mark.parametrize(
    "how",
    [
        {"convention": "poisson", "max_participations": 7},
        {"convention": "replace-one"},
        {"convention": "paper", "population": 10**6},
        {"convention": "poisson", "neighbours": "replace-one", "delta": 1e-4},
    ],
)
def test_a_plan_and_its_statement_are_read_back(how: dict[str, Any]) -> None:
    privacy = Privacy(noise_multiplier=2.0, clip=Clipping(1.5, counts=1.0), **how)
    plan = privacy.plan(population=1000, cohort=50, rounds=20)
    written = json.loads(json.dumps(plan.as_dict()))
    assert PrivacyPlan.from_dict(written) == plan
    said = plan.statement(seeded_noise=False, seeded_cohorts=True)
    written = json.loads(json.dumps(said.as_dict()))
    assert PrivacyStatement.from_dict(written) == said
    assert PrivacyPlan.from_dict(written) == plan
    with pytest.raises(TypedError, match="the privacy plan: cohort"):
        PrivacyPlan.from_dict(written | {"cohort": "many"})


def alike(one: Any, other: Any) -> bool:
    """Equal, where NaN is NaN."""
    return plain(one) == plain(other)


def test_evaluations_are_read_back(population) -> None:
    data = population(users=40)
    model = fpfl.mlp(5, seed=0)
    constraint = fpfl.fnr_parity("sex", tolerance=0.1)
    found = fpfl.evaluate_model(model, data, constraint=constraint, bootstrap=20)
    read = fpfl.Evaluation.from_dict(json.loads(json.dumps(found.as_dict())))
    assert alike(read, found)
    assert (read.verdict_in_words, str(read)) == (found.verdict_in_words, str(found))
    private = evaluate_privately(model, data, constraint=constraint, epsilon=1.0, bound=2.0)
    again = PrivateEvaluation.from_dict(json.loads(json.dumps(private.as_dict())))
    assert alike(again, private)
    assert (str(again), again.statement()) == (str(private), private.statement())
