"""Rates, groups and constraints: what is counted, for whom, and what is refused."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.fairness import constraints, rates
from fpfl.fairness.constraints import Constraint
from fpfl.fairness.groups import UNKNOWN, Attribute, Group, groups_by

RANGE = (-2.0, 6.0)

TWO_CLASSES = {
    "FNR": rates.false_negative_rate(),
    "FNR of class 0": rates.false_negative_rate(positive=0),
    "FPR": rates.false_positive_rate(),
    "FPR of class 0": rates.false_positive_rate(positive=0),
    "TPR": rates.true_positive_rate(),
    "accuracy": rates.accuracy(),
    "selection rate": rates.selection_rate(),
}
MANY_CLASSES = {
    "accuracy": rates.accuracy(),
    "recall[0]": rates.class_recall(0),
    "recall[3]": rates.class_recall(3),
    "FNR": rates.false_negative_rate(positive=2),
    "FPR": rates.false_positive_rate(positive=2),
    "selection rate": rates.selection_rate(positive=2),
}
REGRESSION = {
    "squared error": rates.squared_error(RANGE),
    "absolute error": rates.absolute_error(RANGE),
    "mean prediction": rates.mean_prediction(RANGE),
}

SEX = Attribute("sex", ("Female", "Male"))
RACE = Attribute("race", ("A", "B", "C"), unknown=True)
AGE = Attribute("age", ("young", "old"))


# Rates


@pytest.mark.parametrize(
    ("rate", "classes"),
    [(rate, 2) for rate in TWO_CLASSES.values()] + [(rate, 4) for rate in MANY_CLASSES.values()],
    ids=[*TWO_CLASSES, *(f"{name}, four classes" for name in MANY_CLASSES)],
)
def test_the_stand_in_is_the_rate_where_scores_are_hard(rate, classes):
    # Every pair of prediction and label.
    p = torch.arange(classes).repeat_interleave(classes)
    y = torch.arange(classes).repeat(classes)
    scores = torch.nn.functional.one_hot(p, classes).double()
    true = rate.evaluate(p, y)
    counted = rate.condition(y)
    assert counted.dtype == torch.bool
    assert counted.any()
    assert torch.equal(rate.surrogate(scores, y)[counted], true[counted].double())
    assert bool(((true == 0) | (true == 1)).all())
    assert rate.kind == "classification"


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_rates_and_stand_ins_are_in_the_unit_interval(seed):
    generator = torch.Generator().manual_seed(seed)
    for family, classes in ((TWO_CLASSES, 2), (MANY_CLASSES, 4)):
        scores = torch.rand((30, classes), generator=generator).softmax(-1)
        y = torch.randint(classes, (30,), generator=generator)
        for rate in family.values():
            for f in (rate.evaluate(scores.argmax(-1), y), rate.surrogate(scores, y)):
                assert f.shape == (30,)
                assert bool(((f >= 0) & (f <= 1)).all())
    low, high = RANGE
    p, y = low + (high - low) * torch.rand((2, 30), generator=generator, dtype=torch.float64)
    for rate in REGRESSION.values():
        f = rate.evaluate(p, y)
        assert bool(((f >= 0) & (f <= 1)).all())
        assert torch.equal(f, rate.surrogate(p, y))
        assert rate.kind == "regression"


def test_a_count_is_bounded_whatever_is_predicted():
    p, y = torch.tensor([-100.0, 100.0, math.pi]), torch.tensor([6.0, -2.0, 1.0])
    for rate in REGRESSION.values():
        f = rate.evaluate(p, y)
        assert bool(((f >= 0) & (f <= 1)).all())


def test_stand_ins_have_the_gradients_of_the_papers_appendix():
    scores = torch.tensor([[0.3, 0.7], [0.6, 0.4]], requires_grad=True)
    y = torch.tensor([1, 0])
    expected = {
        "FNR": [[0.0, -1.0], [0.0, -1.0]],
        "FPR": [[0.0, 1.0], [0.0, 1.0]],
        "TPR": [[0.0, 1.0], [0.0, 1.0]],
        "accuracy": [[0.0, 1.0], [1.0, 0.0]],
        "selection rate": [[0.0, 1.0], [0.0, 1.0]],
    }
    for name, gradient in expected.items():
        (found,) = torch.autograd.grad(TWO_CLASSES[name].surrogate(scores, y).sum(), scores)
        assert torch.equal(found, torch.tensor(gradient)), name


def test_conditions():
    y = torch.tensor([0, 1, 2, 1])
    everyone = [True] * 4
    one = [False, True, False, True]
    expected = {
        rates.false_negative_rate(): one,
        rates.true_positive_rate(): one,
        rates.false_positive_rate(): [not x for x in one],
        rates.class_recall(2): [False, False, True, False],
        rates.accuracy(): everyone,
        rates.selection_rate(): everyone,
        rates.squared_error(RANGE): everyone,
        rates.absolute_error(RANGE): everyone,
        rates.mean_prediction(RANGE): everyone,
    }
    for rate, counted in expected.items():
        assert rate.condition(y).tolist() == counted, rate.name


def test_values_by_hand():
    p, y = torch.tensor([0, 1, 1, 0]), torch.tensor([1, 1, 0, 0])
    expected = {"FNR": [1, 0], "FPR": [1, 0], "TPR": [0, 1], "accuracy": [0, 1, 0, 1]}
    for name, values in expected.items():
        rate = TWO_CLASSES[name]
        assert rate.evaluate(p, y)[rate.condition(y)].tolist() == values, name
    p, y = torch.tensor([0.0, 6.0]), torch.tensor([2.0, -2.0])
    assert REGRESSION["squared error"].evaluate(p, y).tolist() == [1 / 16, 1.0]
    assert REGRESSION["absolute error"].evaluate(p, y).tolist() == [1 / 4, 1.0]
    assert REGRESSION["mean prediction"].evaluate(p, y).tolist() == [1 / 4, 1.0]


def test_rates_keep_the_shape_of_a_padded_cohort():
    scores = torch.rand(3, 5, 2).softmax(-1)
    y = torch.randint(2, (3, 5))
    for rate in TWO_CLASSES.values():
        assert rate.condition(y).shape == (3, 5)
        assert rate.evaluate(scores.argmax(-1), y).shape == (3, 5)
        assert rate.surrogate(scores, y).shape == (3, 5)


@pytest.mark.parametrize("make", [rates.squared_error, rates.absolute_error, rates.mean_prediction])
@pytest.mark.parametrize("label_range", [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_an_empty_label_range_is_refused(make, label_range):
    with pytest.raises(ValueError, match=r"label range .* is empty; give \(low, high\)"):
        make(label_range)


# Groups


def test_membership_of_attributes_one_by_one():
    groups = groups_by([SEX, RACE])
    assert groups.names == ("sex=Female", "sex=Male", "race=A", "race=B", "race=C")
    assert len(groups) == 5
    codes = torch.tensor([[0, 0], [1, 2], [1, UNKNOWN]])
    assert groups.membership(codes).tolist() == [
        [True, False, True, False, False],
        [False, True, False, False, True],
        [False, True, False, False, False],
    ]


def test_membership_of_intersections():
    groups = groups_by([SEX, RACE], [("race", "sex")])
    assert groups.names == tuple(
        f"race={race} & sex={sex}" for race in RACE.values for sex in SEX.values
    )
    assert groups.groups[3] == Group((("race", "B"), ("sex", "Male")))
    codes = torch.tensor([[0, 0], [1, 1], [1, UNKNOWN], [0, 2]])
    found = groups.membership(codes)
    assert found.nonzero().tolist() == [[0, 0], [1, 3], [3, 4]]
    padded = groups.membership(codes.reshape(2, 2, 2))
    assert torch.equal(padded.reshape(4, 6), found)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_partition_means_exactly_one_group(seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack(
        [torch.randint(len(x.values), (40,), generator=generator) for x in (SEX, AGE)], dim=-1
    )
    for by in (["sex"], ["age"], [("sex", "age")]):
        groups = groups_by([SEX, AGE], by)
        assert groups.partition
        assert bool((groups.membership(codes).sum(-1) == 1).all())


@pytest.mark.parametrize(
    ("declared", "by", "partition"),
    [
        ([SEX], None, True),
        ([SEX, AGE], ["age"], True),
        ([SEX, AGE], [("sex", "age")], True),
        ([SEX, AGE], None, False),  # everyone is in two groups
        ([SEX, AGE], ["sex", ("sex", "age")], False),
        ([RACE], None, False),  # some are in none
        ([SEX, RACE], [("sex", "race")], False),
        ([SEX, RACE], ["sex"], True),  # race's unknowns do not matter here
        ([SEX, RACE], ["race"], False),
    ],
)
def test_partition(declared, by, partition):
    assert groups_by(declared, by).partition is partition


def test_what_groups_refuse():
    with pytest.raises(ValueError, match=r"declares no attributes.*declare e\.g\. Attribute"):
        groups_by([])
    with pytest.raises(ValueError, match="name at least one"):
        groups_by([SEX], [])
    with pytest.raises(
        ValueError, match=r"no attribute 'age' in the schema; it declares \['sex'\]"
    ):
        groups_by([SEX], ["age"])
    with pytest.raises(ValueError, match=r"no attribute 'age'"):
        groups_by([SEX], [("sex", "age")])
    with pytest.raises(ValueError, match="'sex=Female' was asked for twice"):
        groups_by([SEX], ["sex", "sex"])
    for values in (("Female",), ("Female", "Female"), ()):
        with pytest.raises(ValueError, match="at least two values, each once"):
            Attribute("sex", values)


# Constraints


def test_built_in_constraints():
    expected = {
        "fnr_parity": ["FNR"],
        "equal_opportunity": ["FNR"],
        "accuracy_parity": ["accuracy"],
        "demographic_parity": ["selection rate"],
        "equalized_odds": ["FNR", "FPR"],
    }
    for name, rate_names in expected.items():
        constraint = constraints.BY_NAME[name]("sex", ("sex", "age"), tolerance=0.1)
        assert [rate.name for rate in constraint.rates] == rate_names
        assert constraint.by == ("sex", ("sex", "age"))
        assert constraint.tolerance == 0.1
        assert constraint.kind == "classification"
        assert len(constraint.bind([SEX, AGE])) == 6
    error = constraints.equal_error(label_range=RANGE, squared=False)
    assert error.kind == "regression"
    assert error.rates[0].name == "absolute error"
    assert constraints.equal_error(label_range=RANGE).rates[0].name == "squared error"


def test_a_constraint_without_names_is_on_every_attribute():
    found = constraints.fnr_parity().bind([SEX, RACE])
    assert found.names == groups_by([SEX, RACE]).names


def test_predictive_parity_is_refused_and_says_why():
    for make in (constraints.predictive_parity, constraints.BY_NAME["predictive_parity"]):
        with pytest.raises(ValueError, match="conditions on the prediction") as refusal:
            make("sex")
        assert "measured" in str(refusal.value)
        assert "equalized_odds" in str(refusal.value)


def test_what_constraints_refuse():
    fnr = rates.false_negative_rate()
    with pytest.raises(ValueError, match="at least one rate"):
        Constraint(())
    with pytest.raises(ValueError, match="one name"):
        Constraint((fnr, rates.false_negative_rate(positive=0)))
    with pytest.raises(ValueError, match="mix classification and regression"):
        Constraint((fnr, rates.squared_error(RANGE)))
    for tolerance in (-0.01, 1.0, float("nan")):
        with pytest.raises(ValueError, match="tolerance is"):
            Constraint((fnr,), tolerance=tolerance)
    with pytest.raises(ValueError, match="no attribute 'age'"):
        constraints.fnr_parity("age").bind([SEX])


@pytest.mark.parametrize(
    "rate",
    [rates.false_negative_rate(), rates.false_positive_rate(0), rates.true_positive_rate(2),
     rates.class_recall(1), rates.accuracy(), rates.selection_rate()],
    ids=lambda rate: rate.name,
)  # fmt: skip
def test_slopes_in_closed_form_are_the_standins(rate) -> None:
    scores = torch.rand(20, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (20,))
    (wanted,) = torch.autograd.grad(rate.surrogate(scores, labels).sum(), scores)
    torch.testing.assert_close(rate.slope(scores.detach(), labels), wanted)


@pytest.mark.parametrize("rate", [*TWO_CLASSES.values(), *MANY_CLASSES.values(),
                                  *REGRESSION.values()], ids=lambda rate: rate.name)  # fmt: skip
def test_a_rate_can_be_sent_to_another_process(rate: rates.Rate) -> None:
    """Its functions have no names that pickle could find: it is made anew, and is the same."""
    assert pickle.loads(pickle.dumps(rate)) is rate


def test_a_made_up_rate_is_pickled_by_its_functions() -> None:
    named = rates.Rate("named", torch.isfinite, torch.eq, torch.sub)
    assert pickle.loads(pickle.dumps(named)) == named
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(rates.Rate("unnamed", lambda y: y > 0, torch.eq, torch.sub))
