"""The noise: the discrete Gaussian to the last bit, the grid, and what the grid allows for."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import make_population
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fpfl import Clipping, Privacy, fnr_parity
from fpfl.aggregation import (
    DenseRows,
    SeededNoise,
    SystemNoise,
    ThirdParty,
    clip,
    clip_rules,
    clipped_sum,
)
from fpfl.aggregation import noise as discrete
from fpfl.aggregation.noise import GRID_BITS, discrete_gaussian
from fpfl.aggregation.sums import grid_stddev, reserve
from fpfl.privacy import Block
from fpfl.users import CohortEngine, FlatModel, Layout

CPU = torch.device("cpu")


# Exact arithmetic, by other means than the sampler's own: Taylor's series in fractions.


def exponential(x: Fraction, bits: int = 300) -> Fraction:
    """exp(−x) to within 2^−bits."""
    halvings = max(0, math.ceil(x).bit_length())
    x /= 2**halvings
    precision = bits + 2 * halvings + 8
    term = total = Fraction(1)
    for n in itertools.count(1):
        term *= -x / n
        total += term
        if abs(term) < Fraction(1, 2**precision):
            break
    unit = 2 ** (precision + 8)
    for _ in range(halvings):
        total = Fraction(math.floor(total * total * unit), unit)
    return total


def cumulative(bits: int = 300) -> list[Fraction]:
    """P(0) + ... + P(k), for all k that matter at so many bits, to within about 2^−bits."""
    weights = [exponential(Fraction(k * k, 2), bits + 16) for k in range(math.isqrt(2 * bits) + 2)]
    total = sum(weights)
    return [part / total for part in itertools.accumulate(weights)]


def acceptance(k: int, j: int, bits: int) -> Fraction:
    y = Fraction(j, 2**bits)
    return exponential(y * (2 * k + y) / 2)


class Script:
    """A byte source that says what it was told to."""

    def __init__(self, words: Iterable[int]) -> None:
        self.words = list(words)

    def __call__(self, size: int) -> bytes:
        assert size % 8 == 0
        taken, self.words = self.words[: size // 8], self.words[size // 8 :]
        assert len(taken) == size // 8, "more bytes were asked for than are scripted"
        return b"".join(word.to_bytes(8, "little") for word in taken)


def pseudo(seed: int):
    """A byte source of good bytes that can be had again."""
    count = itertools.count()

    def source(size: int) -> bytes:
        return hashlib.shake_128(f"{seed} {next(count)}".encode()).digest(size)

    return source


def digits(number: Fraction, known: int, words: int, offset: int) -> tuple[int, list[int]]:
    """A number's first bits and so many words after them, with ``offset`` added at their end."""
    value = math.floor(number * 2 ** (known + 64 * words)) + offset
    rest = [(value >> 64 * (words - 1 - i)) & (2**64 - 1) for i in range(words)]
    return value >> 64 * words, rest


@given(st.integers(0, 6), st.integers(1, 2**24 - 1), st.integers(10, 200))
@settings(max_examples=40)
def test_the_slow_paths_exponential_is_right_to_a_unit(k, j, bits) -> None:
    scaled = acceptance(k, j, GRID_BITS) * 2**bits
    found = discrete._exponential(j * ((2 * k << GRID_BITS) + j), 2 * GRID_BITS + 1, bits)
    assert abs(found - scaled) < 1


@given(
    st.integers(0, 6), st.integers(1, 2**24 - 1), st.integers(0, 3), st.sampled_from([-2, -1, 1, 2])
)
@settings(max_examples=60)
def test_bits_next_to_the_probability_are_decided_as_fractions_decide(k, j, words, offset) -> None:
    """The uniform number agrees with p for 23, 87, 151 or 215 bits: one unit less is accepted."""
    p = acceptance(k, j, GRID_BITS)
    value, rest = digits(p, 23, words, offset)
    if not 0 <= value < 2**23:
        return
    more = [0x5555555555555555] * 2  # these cannot matter
    below = discrete._is_below(value, 23, k, j, GRID_BITS, Script(rest + more))
    assert below == (offset < 0)


@pytest.mark.parametrize("bits", [1, 2, 5, 24])
def test_attempts_next_to_the_threshold(bits) -> None:
    """Whole attempts, with acceptance bits on either side of p and on it."""
    rng = np.random.default_rng(bits)
    places = range(2**bits) if bits < 6 else [0, 1, 2, 2**bits - 1, *rng.integers(0, 2**bits, 30)]
    cell = {k: int(np.flatnonzero(discrete._choices() == k)[0]) for k in range(5)}
    for k, j in itertools.product(range(5), map(int, places)):
        p = acceptance(k, j, bits)
        first, (rest,) = digits(p, 23, 1, -5)
        for negative, (u, more, accepted) in itertools.product(
            (0, 1),
            [
                (first - 1, [], True),
                (first, [rest], True),
                (first, [rest + 10], False),
                (first + 1, [], False),
            ],
        ):
            if not (0 <= u < 2**23 and all(0 <= word < 2**64 for word in more)):
                continue
            word = j | negative << 24 | cell[k] << 25 | u << 41
            found = discrete._attempts(1, Script([word, *more, 2**63, 2**63]), bits).tolist()
            x = (k << bits) + j
            if x == 0:
                assert found == ([] if negative else [0])
            else:
                assert found == ([-x if negative else x] if accepted else [])


def test_the_choice_of_k_is_decided_exactly_where_it_is_decided() -> None:
    limits = cumulative()
    table = discrete._choices()
    undecided = np.flatnonzero(table == discrete._UNDECIDED).tolist()
    for cell in undecided:  # each has a limit inside, or next to it by less than 2⁻⁶³
        assert any(cell <= limit * 2**16 <= cell + 1 for limit in limits)
    assert len(undecided) <= 6
    decided = np.split(np.arange(2**16), undecided)
    for run in decided:
        cells = [int(c) for c in run if table[c] != discrete._UNDECIDED]
        if not cells:
            continue
        (k,) = {int(table[c]) for c in cells}
        assert cells[-1] + 1 <= limits[k] * 2**16
        assert k == 0 or cells[0] >= limits[k - 1] * 2**16


@pytest.mark.parametrize("words", [1, 2, 3])
@pytest.mark.parametrize("k", range(12))
def test_the_choice_of_k_at_its_limits_and_in_the_tail(k, words) -> None:
    """One unit below c_k is k, one above is k + 1: for k = 11 that happens once in 10²⁶ draws."""
    limit = cumulative()[k]
    for offset, expected in ((-2, k), (2, k + 1)):
        value, rest = digits(limit, 16, words, offset)
        if value >= 2**16 or (k > 6 and words < 2) or (k > 9 and words < 3):
            continue  # the next limits are within this unit
        assert discrete._chosen(value, 16, Script([*rest, 2**63, 2**63])) == expected


def test_the_tail_has_no_end() -> None:
    """U within 2⁻⁵²⁸ of 1 is some k beyond 25, not the last of a table."""
    value = discrete._chosen(2**16 - 1, 16, Script([2**64 - 1] * 8 + [2**62] * 2))
    assert value > 25


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's test."""
    expected = counts.sum() * probabilities / probabilities.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_small_deviations_have_the_discrete_gaussians_distribution(bits) -> None:
    """Chi-square over all values within 4 σ: a false alarm once in 10⁶."""
    sigma = 2**bits
    x = discrete_gaussian(300_000, bits=bits)
    values = np.arange(-4 * sigma, 4 * sigma + 1)
    counts = np.array([(x == value).sum() for value in values])
    weights = np.exp(-0.5 * (values / sigma) ** 2)
    wide = np.exp(-0.5 * (np.arange(-99 * sigma, 99 * sigma + 1) / sigma) ** 2).sum()
    counts = np.append(counts, len(x) - counts.sum())
    assert p_value(counts, np.append(weights, wide - weights.sum())) > 1e-6


def test_the_noise_has_a_gaussians_quantiles_low_bits_and_moments() -> None:
    """Each of the five checks gives a false alarm once in 10⁶."""
    n = 400_000
    x = discrete_gaussian(n)
    z = torch.from_numpy(x / 2.0**GRID_BITS)
    cells = (torch.special.ndtr(z) * 200).long().bincount(minlength=200).numpy()
    assert p_value(cells, np.ones(200)) > 1e-6
    assert p_value(np.bincount(x & 255, minlength=256), np.ones(256)) > 1e-6
    # Mean, variance and fourth moment: five standard errors.
    assert abs(float(z.mean())) < 5 / n**0.5
    assert abs(float(z.square().mean()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float(z.pow(4).mean()) - 3) < 5 * (96 / n) ** 0.5
    assert x.dtype == np.int64


def test_the_same_bytes_give_the_same_numbers_and_few_are_needed() -> None:
    asked = []

    def counted(size: int) -> bytes:
        asked.append(size)
        return source(size)

    source = pseudo(1)
    one = discrete_gaussian(100_000, counted)
    source = pseudo(1)
    assert np.array_equal(one, discrete_gaussian(100_000, counted))
    assert not np.array_equal(one, discrete_gaussian(100_000, pseudo(2)))
    assert sum(asked) / 200_000 < 12
    for size in (0, 1, 7):
        assert discrete_gaussian(size).shape == (size,)


def masses(sigma: int) -> tuple[np.ndarray, np.ndarray]:
    """The discrete Gaussian and the rounded one, on the numbers within 12 σ."""
    x = np.arange(-12 * sigma, 12 * sigma + 1)
    weights = np.exp(-0.5 * (x / sigma) ** 2)
    edges = torch.from_numpy((np.append(x, x[-1] + 1) - 0.5) / (sigma * 2**0.5))
    # From the nearer tail, so that no digits are lost.
    lower = 0.5 * torch.special.erfc(-edges).diff().numpy()
    upper = -0.5 * torch.special.erfc(edges).diff().numpy()
    return weights / weights.sum(), np.where(x < 0, lower, upper)


@pytest.mark.parametrize("sigma", [4, 8, 16])
def test_the_rounded_gaussian_is_as_near_as_is_said(sigma) -> None:
    """KL = 1/(576 σ⁴), up to a relative error of the order σ⁻²."""
    discrete_, rounded = masses(sigma)
    ratio = rounded / discrete_
    # −log r + r − 1 has the same sum as −log r, without the cancelling.
    divergence = float((discrete_ * (ratio - 1 - np.log1p(ratio - 1))).sum())
    assert divergence * 576 * sigma**4 == pytest.approx(1, abs=2 / sigma**2 + 1e-3)
    assert math.sqrt(1 / 1152) / 2**48 < 2**-53


@given(st.integers(1, 6), st.integers(1, 30), st.floats(1.01, 40))
@settings(max_examples=60)
def test_renyi_divergences_are_at_most_the_gaussians(sigma, shift, order) -> None:
    """Canonne, Kamath and Steinke's theorem, on numbers."""
    far = 60 * sigma + math.ceil(shift * order) + shift
    x = np.arange(-far, far + 1)
    log_p, log_q = -0.5 * (x / sigma) ** 2, -0.5 * ((x - shift) / sigma) ** 2
    log_total = np.log(np.exp(log_p).sum())
    divergence = (
        np.logaddexp.reduce(order * log_p + (1 - order) * log_q) - log_total
    ) / (order - 1)  # fmt: skip
    assert divergence <= order * shift**2 / (2 * sigma**2) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("size", [1, 10, 20_000])
def test_seeded_noise_is_the_rounds_own(size) -> None:
    one, again, other = SeededNoise(1), SeededNoise(1), SeededNoise(2)
    first = {t: one.integers(size, t, device=CPU) for t in (1, 2, 3)}
    # Another order, other sizes in between: as after a resume.
    again.integers(5, 9, device=CPU)
    for t in (3, 1, 2):
        assert torch.equal(again.integers(size, t, device=CPU), first[t])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first[1], other.integers(size, 1, device=CPU))
    assert first[1].dtype == torch.int64
    if size > 1000:  # 5 standard errors: a false alarm below 10⁻⁶
        z = torch.stack(list(first.values())).double() / 2.0**GRID_BITS
        assert abs(float(z.square().mean()) - 1) < 5 * (2 / z.numel()) ** 0.5
        assert float((torch.corrcoef(z) - torch.eye(3)).abs().max()) < 5 / size**0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_on_a_gpu() -> None:
    device = torch.device("cuda")
    one, again = (SeededNoise(1).integers(1000, 4, device=device) for _ in range(2))
    assert one.device.type == "cuda"
    assert torch.equal(one, again)
    assert SystemNoise().integers(10, 1, device=device).device.type == "cuda"


# The grid.

WHERE = Layout(4, ("FNR", "FPR"), ("a", "b"))
HOW = Clipping(1.5, counts=2.0, selection=1.0)


class Chosen:
    """Noise that a test chooses."""

    seeded = True

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def integers(self, size: int, round: int, *, device: torch.device) -> Tensor:
        assert self.numbers.shape == (size,)
        return self.numbers.clone()


def private(source=None, multiplier: float = 1.3, convention: str = "poisson") -> ThirdParty:
    blocks = HOW.blocks(constrained=True, selection=True)
    plan = Privacy(noise_multiplier=multiplier, clip=HOW, convention=convention).plan(
        population=1000, cohort=100, rounds=10, blocks=blocks
    )
    return ThirdParty(WHERE.slices, blocks, plan, source or SystemNoise())


def vector(seed: int, scale: float) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(scale * rng.standard_t(2, WHERE.size))


def steps_of(third_party: ThirdParty) -> Tensor:
    return third_party.noise_stddev * 2.0**-GRID_BITS


@given(st.integers(0, 10**6), st.floats(1e-9, 1e3), st.floats(0.1, 100), st.booleans())
@settings(max_examples=50)
def test_released_numbers_are_whole_steps(seed, scale, multiplier, seeded) -> None:
    third_party = private(SeededNoise(seed) if seeded else None, multiplier)
    steps = steps_of(third_party)
    released = third_party.noised(vector(seed, scale), 1)
    assert torch.equal((released / steps).round() * steps, released)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=50)
def test_what_can_be_released_does_not_depend_on_the_data(seed, scale, other) -> None:
    """Whatever one population's noise leads to, another's leads to as well, to the last bit."""
    one, two = vector(seed, scale), vector(seed + 1, other)
    noise = torch.from_numpy(discrete_gaussian(WHERE.size, pseudo(seed)))
    steps = steps_of(private())
    moved = noise + (one / steps).round().long() - (two / steps).round().long()
    released = private(Chosen(noise)).noised(one, 1)
    assert torch.equal(released, private(Chosen(moved)).noised(two, 1))


def test_sums_that_are_no_numbers_are_no_errors() -> None:
    third_party = private(Chosen(torch.zeros(WHERE.size, dtype=torch.int64)))
    total = torch.zeros(WHERE.size, dtype=torch.float64)
    total[:5] = torch.tensor([math.nan, math.inf, -math.inf, 1e300, -1e300])
    steps = steps_of(third_party)
    expected = torch.tensor([0.0, 1, -1, 1, -1], dtype=torch.float64) * 2.0**62 * steps[:5]
    assert torch.equal(third_party.noised(total, 1)[:5], expected)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e4), st.integers(1, 10**6), st.integers(1, 10**8))
@settings(max_examples=100)
def test_the_grids_deviation_keeps_the_plans_ratio(bound, multiplier, numbers, users) -> None:
    """(C(1 + η) + g√d)/s' = C/s, and where a user is replaced at most 2C/s."""
    stddev = bound * multiplier
    slack = multiplier * numbers**0.5 / 2.0**GRID_BITS
    if slack >= 0.5:
        with pytest.raises(ValueError, match="smaller noise multiplier"):
            grid_stddev(stddev, bound, numbers, users)
        return
    real = grid_stddev(stddev, bound, numbers, users)
    step = real / 2.0**GRID_BITS
    eta = reserve(numbers, users)
    change = bound * (1 + eta) + step * numbers**0.5
    assert change / real == pytest.approx(bound / stddev, rel=1e-12)
    replaced = 2 * bound * (1 + eta) + step * numbers**0.5
    assert replaced / real <= 2 * bound / stddev * (1 + 1e-12)
    assert stddev < real < stddev * (1 + eta) * (1 + 2 * slack + 1e-12)


@pytest.mark.parametrize("convention", ["paper", "replace-one", "poisson"])
def test_the_third_partys_deviations_follow_the_formula(convention) -> None:
    third_party = private(convention=convention)
    numbers = {"gradients": 4 + 16, "counts": 4 + 4, "selection": 2}
    for rule in third_party.rules:
        assert rule.size == numbers[rule.name]
        planned = third_party.plan.noise_stddev(rule.name)
        wanted = grid_stddev(planned, rule.bound, rule.size)
        for place in rule.places:
            assert bool((third_party.noise_stddev[place] == wanted).all())
        assert 1 < wanted / planned < 1.001


@given(st.integers(0, 10**6), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0]))
@settings(max_examples=50)
def test_rounding_moves_the_difference_of_neighbours_by_a_step_at_most(seed, size) -> None:
    zero = private(Chosen(torch.zeros(WHERE.size, dtype=torch.int64)))
    steps = steps_of(zero)
    one = vector(seed, 1.0)
    two = one + size * steps * torch.from_numpy(np.random.default_rng(seed).random(WHERE.size))
    moved = zero.noised(one, 1) - zero.noised(two, 1)
    assert bool(((moved - (one - two)).abs() <= steps * (1 + 1e-6)).all())


def test_the_noise_is_the_rounds() -> None:
    third_party = private(SeededNoise(5))
    total = vector(0, 1.0)
    first, second = third_party.noised(total, 1), third_party.noised(total, 2)
    assert torch.equal(third_party.noised(total, 1), first)
    assert not torch.equal(first, second)
    like = torch.zeros(1, dtype=torch.float32)
    nobody = third_party.noised(torch.zeros(WHERE.size, dtype=torch.float64), 2)
    assert torch.equal(third_party.release([], like, 2), nobody.float())


# Rounding in clipped sums, which the reserve is for.


@given(
    st.integers(0, 10**6), st.sampled_from([2, 40, 128, 129, 513, 700, 2000]),
    st.sampled_from([3, 65, 513]), st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    st.sampled_from([0.1, 1.0, 30.0]),
)  # fmt: skip
@settings(max_examples=60)
def test_one_user_changes_a_sum_by_the_bound_and_the_reserve(
    seed, users, size, alike, scale
) -> None:
    """Users all in one direction, in none, and in between; float32 throughout."""
    g = torch.Generator().manual_seed(seed)
    direction, *others = nn.functional.normalize(torch.randn(users + 1, size, generator=g), dim=1)
    rows = scale * (alike * direction + (1 - alike**2) ** 0.5 * torch.stack(others))
    places = {"loss_gradient": slice(0, size)}
    rules = clip_rules((Block("gradients", 1.0, 1.0),), places)

    def total(rows: Tensor) -> Tensor:
        return clipped_sum(DenseRows(rows, places), rules)

    exact = clip(DenseRows(rows.double(), places), rules)
    assert float((total(rows) - exact.sum(0)).norm()) < users * 1e-9
    for left_out in (0, users // 2, users - 1):
        rest = torch.cat([rows[:left_out], rows[left_out + 1 :]])
        change = total(rows) - total(rest)
        assert float(change.norm()) <= 1.0 + reserve(size, users)
        assert torch.equal(change, total(rows[left_out : left_out + 1]))


@pytest.mark.parametrize("hidden", [3, 60])
@pytest.mark.parametrize("constrained", [False, True])
def test_the_engines_sums_keep_within_the_reserve(hidden, constrained) -> None:
    """2,500 users of one chunk, whose gradients are computed in either form."""
    data = make_population(users=2500, mean=2.0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    constraint = fnr_parity("sex") if constrained else None
    users = np.arange(data.population)
    cohorts = (users, users[1:], np.delete(users, 1200))
    sums = []
    for dtype in (torch.float32, torch.float64):
        model = FlatModel.of(net.to(dtype))
        engine = CohortEngine(model, data.to("cpu", dtype), constraint)
        blocks = Clipping(0.2).blocks(constrained=constrained, selection=True)
        rules = clip_rules(blocks, engine.layout.slices)
        for cohort in cohorts:
            parts = engine.statistics(model.vector(), cohort)
            sums.append(sum(clipped_sum(part, rules) for part in parts))
    for single, double in zip(sums[:3], sums[3:], strict=True):
        for rule in rules:
            error = torch.cat([(single - double)[place] for place in rule.places]).norm()
            assert float(error) < rule.bound * 1e-3
