"""What the server of a secure aggregation sees: numbers that have nothing to do with the vectors.

Every test of a distribution is a χ² test at 10⁻⁸, and there are about 250 of them: a false alarm in
one of 400,000 runs of this file. Each kind also has a test that it sees the fault it is there for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from test_secagg import SAID, Play, a_dealing, some

from fpfl.federation.secagg import (
    STEPS,
    Aggregation,
    Deal,
    Dealing,
    advertise,
    client,
    mask,
    primitives,
    share,
    transcript,
    unmask,
)
from fpfl.federation.secagg.state import ClientState

LEVEL = 1e-8
NAMES = ("n00", "n01", "n02")
SIZE = 48
RUNS = 220
Arrays = dict[str, np.ndarray]


def limit(freedom: int) -> float:
    """What χ² exceeds with a probability of LEVEL (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NormalDist().inv_cdf(1 - LEVEL) * spread**0.5) ** 3


def is_uniform(counts: np.ndarray) -> bool:
    expected = counts.sum() / counts.size
    assert expected > 5
    return float(((counts - expected) ** 2).sum() / expected) < limit(counts.size - 1)


def bytes_of(numbers: np.ndarray) -> np.ndarray:
    return np.bincount(numbers.astype("<u4").ravel().view(np.uint8), minlength=256)


def looks_uniform(numbers: np.ndarray) -> bool:
    """All bytes together, and each of a number's four bytes on its own."""
    data = np.ascontiguousarray(numbers.astype("<u4")).view(np.uint8).reshape(-1, 4)
    each = [np.bincount(data[:, i] >> 2, minlength=64) for i in range(4)]
    return all(map(is_uniform, [bytes_of(numbers), *each]))


def looks_independent(one: np.ndarray, other: np.ndarray) -> bool:
    """Pairs of the highest, and of the lowest, four bits."""
    a, b = one.ravel().astype(np.int64), other.ravel().astype(np.int64)
    pairs = ((a >> 28) * 16 + (b >> 28), (a & 15) * 16 + (b & 15))
    return all(is_uniform(np.bincount(pair, minlength=256)) for pair in pairs)


def same_distribution(one: np.ndarray, other: np.ndarray) -> bool:
    """The two-sample χ² test on counts, without bins that are empty in both."""
    seen = one + other > 0
    a, b = one[seen], other[seen]
    if seen.sum() < 2:
        return True
    k = (b.sum() / a.sum()) ** 0.5
    return float(((k * a - b / k) ** 2 / (a + b)).sum()) < limit(int(seen.sum()) - 1)


def plain(kind: str) -> Arrays:
    """Vectors in three ways with the same sum."""
    total = np.arange(SIZE, dtype=np.uint32) * 1000 + 7
    zero = np.zeros(SIZE, np.uint32)
    other = np.full(SIZE, 123_456_789, np.uint32)
    return {
        "zero": {"n00": zero, "n01": zero, "n02": total},
        "first": {"n00": total, "n01": zero, "n02": zero},
        "large": {"n00": other, "n01": zero - other, "n02": total},
    }[kind]


def masks_of(state: ClientState, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A node's own mask and its pairwise masks, from the state before it masks."""
    session, secrets, digest = (
        state.dealing.session(0),
        state.secrets[0],
        transcript.broadcast(SAID),
    )
    own, pairs = np.zeros(session.size, np.uint32), np.zeros(session.size, np.uint32)
    info = transcript.self_mask_of(session, digest, state.index)
    primitives.add_mask(own, primitives.derive(secrets.seed, info), 1)
    agreement = primitives.KeyAgreement(secrets.masking)
    for peer in state.peers:
        if peer.name in names:
            info = transcript.mask_of(session, digest, state.index, peer.index)
            key = agreement.key(peer.masking, info)
            primitives.add_mask(pairs, key, 1 if state.index < peer.index else -1)
    return own, pairs


def sessions(runs: int, xs: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """Many sessions up to the masked vectors, with rows for runs, by node:

    what comes; that less the node's own mask, as after unmasking; that less its pairwise masks, as
    if it came too late and its masking key was recovered.
    """
    came, without_own, without_pairs = ({name: [] for name in NAMES} for _ in range(3))
    for i in range(runs):
        play = Play(a_dealing(3, 2, 2, size=SIZE, number=i), some(3), xs).until("mask")
        states = {name: ClientState.from_bytes(play.stored[name]) for name in NAMES}
        for name, request in play.server.requests().items():
            y = np.frombuffer(play.answer(name, request)["vector"], "<u4")
            own, pairs = masks_of(states[name], NAMES)
            came[name].append(y)
            without_own[name].append(y - own)
            without_pairs[name].append(y - pairs)
    return tuple(
        {n: np.array(rows[n]) for n in NAMES} for rows in (came, without_own, without_pairs)
    )


@lru_cache(maxsize=3)
def seen(kind: str) -> tuple[Arrays, Arrays, Arrays]:
    return sessions(RUNS, plain(kind))


@pytest.fixture
def left_out(monkeypatch) -> Callable[[str], None]:
    """Make nodes forget one kind of mask."""

    def forget(kind: str) -> None:
        own_keys = []
        real_derive, real_add = client.derive, client.add_mask

        def derive(secret: bytes, info: bytes) -> bytes:
            own_keys.append(real_derive(secret, info))
            return own_keys[-1]

        def add_mask(total: np.ndarray, key: bytes, sign: int) -> None:
            if (key in own_keys) != (kind == "own"):
                real_add(total, key, sign)

        monkeypatch.setattr(client, "derive", derive)
        monkeypatch.setattr(client, "add_mask", add_mask)

    return forget


def before_unmasking(came: Arrays) -> list[np.ndarray]:
    """Each vector, each sum and difference of two, and the sum of all."""
    pairs = [(came[a], came[b]) for a, b in combinations(NAMES, 2)]
    two = [both for a, b in pairs for both in (a + b, a - b)]
    return [*came.values(), *two, sum(came.values())]


def after_unmasking(rest: Arrays) -> list[np.ndarray]:
    """With their own masks gone, each and each sum of two; the sum of all is the result."""
    return [*rest.values(), *(rest[a] + rest[b] for a, b in combinations(NAMES, 2))]


@pytest.mark.parametrize("kind", ["zero", "large"])
def test_masked_vectors_are_uniform_and_so_are_their_sums_before_unmasking(kind) -> None:
    came, _, _ = seen(kind)
    assert all(map(looks_uniform, before_unmasking(came)))
    assert all(looks_independent(came[a], came[b]) for a, b in combinations(NAMES, 2))


@pytest.mark.parametrize("kind", ["zero", "large"])
def test_after_unmasking_all_but_the_whole_sum_is_uniform(kind) -> None:
    _, rest, _ = seen(kind)
    assert all(map(looks_uniform, after_unmasking(rest)))
    assert all(looks_independent(rest[a], rest[b]) for a, b in combinations(NAMES, 2))
    assert (sum(rest.values()) == sum(plain(kind).values())).all()


def test_a_vector_that_comes_too_late_is_still_masked() -> None:
    _, _, late = seen("zero")
    assert all(map(looks_uniform, late.values()))


def test_these_tests_see_that_the_own_mask_is_left_out(left_out) -> None:
    left_out("own")
    came, _, late = sessions(25, plain("zero"))
    assert not all(map(looks_uniform, before_unmasking(came)))
    assert not looks_uniform(late["n00"])


def test_these_tests_see_that_pairwise_masks_are_left_out(left_out) -> None:
    left_out("pairs")
    _, rest, _ = sessions(25, plain("zero"))
    assert not all(map(looks_uniform, after_unmasking(rest)))


def test_these_tests_see_a_mask_that_repeats(monkeypatch) -> None:
    """Masks from a generator that ignores its key: each one uniform, and no two independent."""
    real = client.add_mask
    monkeypatch.setattr(client, "add_mask", lambda total, key, sign: real(total, bytes(32), 1))
    came, _, _ = sessions(25, plain("zero"))
    assert not looks_uniform(came["n00"] - came["n01"])


# A server that sends different models to different nodes (Pasquini, Francati, Ateniese 2022)


def differences(runs: int) -> list[np.ndarray]:
    """What comes out where n02 was sent another model than the others; they have sent zeros."""
    found = []
    for i in range(runs):
        play = Play(a_dealing(3, 2, 2, size=SIZE, number=i), some(3), plain("zero")).until("mask")
        play.step(ask=lambda name, one: {**one, "w": b"crafted"} if name == "n02" else one)
        play.finish()
        found.append(play.total)
    return found


def test_a_vector_that_was_made_with_another_model_does_not_come_out() -> None:
    """All that is opened, is opened: uniform, and with it the sum of the two that agree."""
    opened = np.array(differences(RUNS))
    assert looks_uniform(opened)
    assert looks_uniform(opened - plain("zero")["n02"])


def test_this_test_sees_masks_that_do_not_know_the_model(monkeypatch) -> None:
    """As it was: the masks cancel, and n02's vector lies open."""
    monkeypatch.setattr(transcript, "broadcast", lambda request: b"")
    assert all((one == plain("zero")["n02"]).all() for one in differences(5))


# Two worlds with the same sum


def whole_view(kind: str, runs: int) -> dict[str, np.ndarray]:
    """All that the server receives, by step, node and field: counts of bytes, and of lengths."""
    found: dict[str, np.ndarray] = {}
    for i in range(runs):
        play = Play(a_dealing(3, 2, 2, size=SIZE, number=i), some(3), plain(kind)).finish()
        for step in STEPS:
            for name, answer in play.answers[step].items():
                for key, value in answer.items():
                    if key in ("step", "session", "place", "credential", "unreadable"):
                        continue  # the same in both worlds, whatever happens
                    many = value if isinstance(value, list) else [value]
                    for one in many:
                        assert isinstance(one, bytes)
                        label = f"{step} {name} {key}, {len(many)} of {len(one)} bytes"
                        counts = np.bincount(np.frombuffer(one, np.uint8), minlength=256)
                        found[label] = found.get(label, 0) + counts
    return found


def test_two_worlds_with_the_same_sum_look_the_same() -> None:
    """A two-sample test on every field that the server receives from every node."""
    one, other = whole_view("zero", 110), whole_view("large", 110)
    assert one.keys() == other.keys()  # the same fields, counts and lengths
    assert len(one) > 20
    for label, counts in one.items():
        assert same_distribution(counts, other[label]), label
    for a, b in zip(seen("zero")[:2], seen("large")[:2], strict=True):
        for name in NAMES:
            assert same_distribution(bytes_of(a[name]), bytes_of(b[name]))


def test_the_two_sample_test_sees_a_missing_mask(left_out) -> None:
    left_out("pairs")
    one, other = (sessions(20, plain(kind))[1]["n00"] for kind in ("zero", "large"))
    assert not same_distribution(bytes_of(one), bytes_of(other))


def all_answers(dealing: Dealing, xs: Arrays, gone: dict[str, str], seed: int) -> dict[str, Any]:
    """A dealing and its first session, in which all random bytes come from a seed."""
    nodes = some(5)
    sources = {name: np.random.default_rng([seed, i]).bytes for i, name in enumerate(nodes)}
    deal = Deal(dealing, next(iter(nodes.values())).authority, nodes)
    server: Deal | Aggregation = deal
    states: dict[str, ClientState] = {}
    answers: dict[str, Any] = {}
    while server.step != "done":
        for name, request in server.requests().items():
            if gone.get(name) == server.step:
                continue
            state, identity = states.get(name), nodes[name]
            if server.step == "advertise":
                new = advertise(identity, dealing, sources[name])
            elif server.step == "share":
                new = share(state, request, identity, sources[name])
            elif server.step == "mask":
                new = mask(state, request, xs[name], identity)
            else:
                new = unmask(state, request, identity, sources[name])
            states[name], answers[f"{server.step} {name}"] = new
            server.take(name, new[1])
        server.close_step()
        if server is deal and deal.step == "done":
            server = Aggregation(deal, 0, SAID)
    assert isinstance(server, Aggregation)
    return answers | {"total": server.total()}


@pytest.mark.parametrize("gone", [{}, {"n03": "mask", "n04": "unmask"}])
def test_with_the_same_random_bytes_the_masked_vector_alone_depends_on_the_vector(gone) -> None:
    """Exactly: y = x + m where m does not depend on x, and so with all else that is received."""
    dealing = a_dealing(5, 3, 3, size=SIZE)
    rng = np.random.default_rng(0)
    xs = {name: rng.integers(0, 2**32, SIZE, dtype=np.uint32) for name in some(5)}
    shift = rng.integers(0, 2**32, SIZE, dtype=np.uint32)
    moved = {**xs, "n00": xs["n00"] + shift, "n01": xs["n01"] - shift}
    one, other = (all_answers(dealing, x, gone, 7) for x in (xs, moved))
    assert one.keys() == other.keys()
    assert (one.pop("total") == other.pop("total")).all()
    for key, answer in one.items():
        if key not in ("mask n00", "mask n01"):
            assert answer == other[key], key
            continue
        name = key.split()[1]
        y, z = (np.frombuffer(each["vector"], "<u4") for each in (answer, other[key]))
        assert (z - y == moved[name] - xs[name]).all()
        different = {field for field in answer if answer[field] != other[key][field]}
        assert different == {"vector", "signature"}  # which is of the vector
