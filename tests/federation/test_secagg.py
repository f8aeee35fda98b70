"""Secure aggregation: the right sum or none, whoever drops out, lies, or asks for too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement, product
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.federation import encoding
from fpfl.federation.secagg import (
    STEPS,
    Abandoned,
    Aggregation,
    Authority,
    ClientState,
    Credential,
    Deal,
    Dealing,
    Identity,
    Invalid,
    Refused,
    advertise,
    certificates,
    choose_graph,
    client,
    graph,
    identity,
    mask,
    primitives,
    server,
    shamir,
    share,
    unmask,
)

AUTHORITY = Authority.make()
NEVER = len(STEPS)


@lru_cache(maxsize=1)
def everybody() -> dict[str, Identity]:
    """Sixty nodes. Indices are not in the order of the names, and have gaps."""
    return {f"n{i:02}": AUTHORITY.enrol(f"n{i:02}", 7 * ((13 * i) % 60) + 5) for i in range(60)}


def some(n: int) -> dict[str, Identity]:
    return dict(list(everybody().items())[:n])


def a_dealing(
    n: int, t: int | None = None, least: int = 1, degree: int | None = None, **more: Any
) -> Dealing:
    settings = {"run": b"run", "number": 3, "sessions": 1, "size": 5, **more}
    return Dealing(**settings, threshold=t or 2 * n // 3 + 1, least=least, degree=degree)


SAID = {"round": 1, "w": b"the model", "low": 0.5}


def vectors(names: Iterable[str], size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**32, size, dtype=np.uint32) for name in names}


class Play:
    """A dealing and a session in one process, with every state stored as bytes in between."""

    def __init__(
        self,
        dealing: Dealing,
        nodes: dict[str, Identity],
        xs: dict | None = None,
        place: int = 0,
    ):
        self.dealing, self.nodes, self.place = dealing, nodes, place
        self.session = dealing.session(place)
        self.xs = xs or vectors(nodes, dealing.size)
        self.deal = Deal(dealing, AUTHORITY.trust, nodes)
        self.server: Deal | Aggregation = self.deal
        self.stored: dict[str, bytes] = {}
        self.client_refused: dict[str, str] = {}
        self.answers: dict[str, dict[str, Any]] = {step: {} for step in STEPS}

    def answer(self, name: str, request: Any) -> Any:
        """What a node answers in the current step; its state goes on."""
        identity = Identity.from_bytes(self.nodes[name].to_bytes())
        step = self.server.step
        if step == "advertise":
            state, answer = advertise(identity, Dealing.from_message(request))
        else:
            state = ClientState.from_bytes(self.stored[name])
            if step == "share":
                state, answer = share(state, request, identity)
            elif step == "mask":
                state, answer = mask(state, request, lambda: self.xs[name], identity)
            else:
                state, answer = unmask(state, request, identity)
        self.stored[name] = state.to_bytes()
        self.answers[step][name] = answer
        return answer

    def close(self) -> None:
        self.server.close_step()
        if self.server is self.deal and self.deal.step == "done":
            self.server = Aggregation(self.deal, self.place, SAID)

    def again(self, place: int) -> Play:
        """The next session of the same dealing."""
        self.place, self.session = place, self.dealing.session(place)
        self.server = Aggregation(self.deal, place, SAID)
        self.answers |= {step: {} for step in STEPS[2:]}
        return self

    @property
    def dropped(self) -> dict[str, tuple[str, ...]]:
        return self.deal.dropped | self.server.dropped

    @property
    def refused(self) -> list[Refused]:
        rest = [] if self.server is self.deal else self.server.refused
        return [*self.deal.refused, *rest]

    @property
    def total(self) -> np.ndarray:
        assert isinstance(self.server, Aggregation)
        return self.server.total()

    def step(
        self,
        gone: Iterable[str] = (),
        change: Callable[[str, Any], Any] = lambda name, answer: answer,
        ask: Callable[[str, Any], Any] = lambda name, request: request,
    ) -> None:
        """One step, in which some are gone, and requests and answers may change on their way."""
        answers = {}
        for name, request in self.server.requests().items():
            if name in gone:
                continue
            try:
                answers[name] = self.answer(name, ask(name, request))
            except Refused as refused:
                assert refused.name == name  # noqa: PT017
                self.client_refused[name] = refused.why
        for name, answer in answers.items():
            try:
                self.server.take(name, change(name, answer))
            except Refused as refused:
                assert refused.name == name  # noqa: PT017
        self.close()

    def until(self, step: str) -> Play:
        while self.server.step != step:
            self.step()
        return self

    def finish(self) -> Play:
        return self.until("done")

    def is_right(self, names: Iterable[str] | None = None) -> bool:
        survivors = self.server.survivors
        if names is not None and sorted(names) != list(survivors):
            return False
        expected = sum(self.xs[name] for name in survivors)
        return bool((self.total == expected).all())


def run_with_leavers(play: Play, leaves: dict[str, int]) -> Abandoned | None:
    """Each node falls silent from the step of this number on."""
    try:
        for i in range(len(STEPS)):
            play.step(gone=[name for name, at in leaves.items() if at <= i])
    except Abandoned as abandoned:
        return abandoned
    return None


def outcome(session: Dealing, leaves: dict[str, int]) -> tuple[str | None, list[str]]:
    """The step at which the complete graph has to give up, and who survives otherwise."""
    there = [sorted(name for name, at in leaves.items() if at > i) for i in range(len(STEPS))]
    t, least = session.threshold, session.least
    needed = (max(t, least), max(t, least), max(t, least), t)
    for step, names, fewest in zip(STEPS, there, needed, strict=True):
        if len(names) < fewest:
            return step, []
    return None, there[2]


def check_leavers(session: Dealing, nodes: dict[str, Identity], leaves: dict[str, int]) -> None:
    play = Play(session, nodes)
    abandoned = run_with_leavers(play, leaves)
    step, survivors = outcome(session, leaves)
    assert (abandoned is None) == (step is None), (leaves, abandoned)
    if abandoned is None:
        assert play.is_right(survivors)
        for i, name in enumerate(STEPS):
            assert set(play.dropped[name]) == {one for one, at in leaves.items() if at == i}
    else:
        assert f"{step!r}" in abandoned.reason
        assert abandoned.unmask_sent == (step == "unmask")
        came = sum(at > 3 for at in leaves.values()) if step == "unmask" else 0
        assert abandoned.shares_received == came
        if isinstance(play.server, Aggregation):
            with pytest.raises(ValueError, match="no sum"):
                _ = play.total


# The right sum, or none


@pytest.mark.parametrize(("t", "least"), [(2, 1), (2, 3), (3, 2)])
def test_every_way_of_dropping_out_of_three(t, least) -> None:
    nodes = some(3)
    for when in product(range(NEVER + 1), repeat=3):
        check_leavers(a_dealing(3, t, least), nodes, dict(zip(nodes, when, strict=True)))


def test_every_number_of_drop_outs_at_every_step_of_four() -> None:
    """All 70 ways up to who is who; who is who differs from one to the next."""
    rng = np.random.default_rng(0)
    for when in combinations_with_replacement(range(NEVER + 1), 4):
        names = rng.permutation(list(some(4)))
        leaves = {str(name): at for name, at in zip(names, when, strict=True)}
        check_leavers(a_dealing(4, 2, 2), some(4), leaves)


@given(st.data())
@settings(max_examples=40)
def test_the_sum_is_right_for_random_cohorts(data) -> None:
    n = data.draw(st.integers(2, 8))
    t, least = data.draw(st.integers(1, n)), data.draw(st.integers(1, n))
    size = data.draw(st.sampled_from([1, 3, 40, 17_000]))
    at = st.integers(0, NEVER + 8).map(lambda i: min(i, NEVER))
    leaves = {name: data.draw(at) for name in some(n)}
    check_leavers(a_dealing(n, t, least, size=size), some(n), leaves)


def test_nobody_drops_out_and_extreme_numbers_wrap_around() -> None:
    nodes = some(5)
    xs = {name: np.full(5, 2**32 - 1, np.uint32) for name in nodes}
    play = Play(a_dealing(5), nodes, xs).finish()
    assert play.total.tolist() == [2**32 - 5] * 5
    assert play.total.dtype == np.uint32


@pytest.mark.parametrize("seed", range(3))
def test_a_sparse_graph_of_sixty(seed) -> None:
    rng = np.random.default_rng(seed)
    names = rng.permutation(list(everybody()))
    leaves = dict.fromkeys(everybody(), NEVER) | {str(names[i]): i % 4 for i in range(5)}
    play = Play(a_dealing(60, 7, least=50, degree=12), everybody())
    assert run_with_leavers(play, leaves) is None
    assert play.is_right(name for name, at in leaves.items() if at > 2)
    for answer in play.answers["share"].values():
        assert len(answer["sealed"]) == 13


@given(st.integers(0, 10**6))
@settings(max_examples=25)
def test_a_sparse_graph_gives_the_right_sum_or_none(seed) -> None:
    rng = np.random.default_rng(seed)
    nodes = some(12)
    leaves = {name: int(min(rng.integers(0, 25), NEVER)) for name in nodes}
    play = Play(a_dealing(12, 3, least=4, degree=4), nodes)
    abandoned = run_with_leavers(play, leaves)
    if abandoned is None:
        assert play.is_right()
        # Whoever left early is not in the sum; others may be, unless too few stayed around them.
        assert all(leaves[name] > 2 for name in play.server.survivors)
    else:
        assert any(at < NEVER for at in leaves.values())
    assert not play.client_refused


def test_a_node_that_is_left_alone_is_left_out_before_anybody_masks() -> None:
    nodes = some(12)
    play = Play(a_dealing(12, 3, least=2, degree=4), nodes).until("share")
    alone = "n03"
    circle = graph.neighbours(
        play.dealing, {name: play.answers["advertise"][name]["public"] for name in nodes}
    )[alone]
    play.step(gone=sorted(circle - {alone})[:3])
    assert alone in play.dropped["share"]
    assert alone not in play.server.requests()
    play.finish()
    assert play.is_right()
    assert not play.client_refused


# Messages that are not as they should be


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << (place % 8)
    return bytes(changed)


def damaged(answer: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Every field with a bit flipped at its start, middle and end, cut, lengthened, left out."""
    for key, value in answer.items():
        if isinstance(value, bytes):
            for place in sorted({0, len(value) // 3, len(value) // 2, len(value) - 1}):
                yield f"{key} flipped at {place}", {**answer, key: flipped(value, place)}
            yield f"{key} cut", {**answer, key: value[:-1]}
            yield f"{key} longer", {**answer, key: value + b"\0"}
        elif isinstance(value, list) and value and isinstance(value[0], bytes):
            for i in (0, len(value) - 1):
                for place in (0, len(value[i]) // 2, len(value[i]) - 1) if value[i] else ():
                    new = [*value[:i], flipped(value[i], place), *value[i + 1 :]]
                    yield f"{key}[{i}] flipped at {place}", {**answer, key: new}
            yield f"{key} shorter", {**answer, key: value[:-1]}
            yield f"{key} of numbers", {**answer, key: [1] * len(value)}
        elif isinstance(value, str):
            yield f"{key} other", {**answer, key: "other"}
        yield f"{key} left out", {k: v for k, v in answer.items() if k != key}
        yield f"{key} of another type", {**answer, key: 3.5}


@pytest.mark.parametrize("step", STEPS)
def test_a_damaged_answer_is_refused_by_name_and_harms_nobody_else(step) -> None:
    nodes = some(4)
    play = Play(a_dealing(4, 3, 3), nodes).until(step)
    requests = play.server.requests()
    answers = {name: play.answer(name, request) for name, request in requests.items()}
    bad = "n01"
    cases = list(damaged(answers[bad]))
    assert len(cases) >= 12
    for what, answer in cases:
        with pytest.raises(Refused) as caught:
            play.server.take(bad, answer)
        assert caught.value.name == bad, what
    for nonsense in (None, {}, {1: 2}, {"step": step}, [1]):
        with pytest.raises(Refused):
            play.server.take(bad, nonsense)
    for name in sorted(set(nodes) - {bad}):
        play.server.take(name, answers[name])
    play.close()
    assert bad in play.dropped[step]
    play.finish()
    assert play.is_right(sorted(set(nodes) - {bad}) if step in STEPS[:3] else nodes)
    assert {refused.name for refused in play.refused} == {bad}


@pytest.mark.parametrize("step", STEPS)
def test_a_right_answer_after_a_wrong_one_counts_and_the_same_again_is_harmless(step) -> None:
    play = Play(a_dealing(4), some(4)).until(step)
    requests = play.server.requests()
    for name, request in requests.items():
        answer = play.answer(name, request)
        with pytest.raises(Refused, match="session"):
            play.server.take(name, {**answer, "session": bytes(32)})
        play.server.take(name, answer)
        play.server.take(name, dict(answer))
        with pytest.raises(Refused, match="before"):
            play.server.take(name, {**answer, "more": 1})
    play.close()
    assert play.finish().is_right(some(4))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("other", [{"number": 4}, {"sessions": 2}, {"run": b"another"}])
def test_answers_of_another_session_are_refused(step, other) -> None:
    nodes = some(4)
    old = Play(a_dealing(4, 3, 3, **other), nodes).finish()
    play = Play(a_dealing(4, 3, 3), nodes).until(step)
    replayed = old.answers[step]["n01"]
    # Even if somebody writes the new session's id over the old one.
    relabelled = {**replayed, "session": play.session.id}
    requests = play.server.requests()
    for answer in (replayed, relabelled):
        with pytest.raises(Refused, match="n01"):
            play.server.take("n01", answer)
    for name in sorted(set(nodes) - {"n01"}):
        play.server.take(name, play.answer(name, requests[name]))
    play.close()
    assert play.finish().is_right(None)


@pytest.mark.parametrize("step", STEPS)
def test_answers_of_other_nodes_and_other_steps_are_refused(step) -> None:
    nodes = some(4)
    play = Play(a_dealing(4, 3, 3), nodes).until(step)
    requests = play.server.requests()
    answers = {name: play.answer(name, request) for name, request in requests.items()}
    with pytest.raises(Refused, match="n00"):
        play.server.take("n00", answers["n01"])
    for earlier in STEPS[: STEPS.index(step)]:
        with pytest.raises(Refused, match=r"step|another session"):
            play.server.take("n00", play.answers[earlier]["n00"])
    with pytest.raises(Refused, match="n55: it was not asked"):
        play.server.take("n55", answers["n01"])
    for name, answer in answers.items():
        play.server.take(name, answer)
    play.close()
    assert play.finish().is_right(nodes)


def test_a_credential_by_another_authority_a_stolen_name_or_index_is_refused() -> None:
    nodes = some(5)
    stranger = Authority.make().enrol("n00", nodes["n00"].index)
    thief = replace(nodes["n01"], signing=nodes["n04"].signing)  # a credential without its key
    changed = nodes["n04"].credential.certificate.replace(b"n04", b"n02")
    renamed = replace(
        nodes["n04"], credential=replace(nodes["n04"].credential, name="n02", certificate=changed)
    )
    double = AUTHORITY.enrol("n03", nodes["n04"].index)
    session = a_dealing(5, 1, 1)
    server = Deal(session, AUTHORITY.trust, nodes)
    server.take("n04", advertise(nodes["n04"], session)[1])
    for name, wrong in (("n00", stranger), ("n01", thief), ("n02", renamed), ("n03", double)):
        with pytest.raises(Refused, match=name):
            server.take(name, advertise(wrong, session)[1])
    with pytest.raises(Refused, match="for 'n01'"):
        server.take("n00", advertise(nodes["n01"], session)[1])
    server.close_step()
    assert server.dropped["advertise"] == ("n00", "n01", "n02", "n03")


def test_keys_of_small_order_are_refused_though_they_are_signed(monkeypatch) -> None:
    session = a_dealing(3)
    nodes = some(3)
    monkeypatch.setattr(client, "public_of", lambda secret: bytes(32))
    _, answer = advertise(nodes["n00"], session)
    with pytest.raises(Refused, match="small order"):
        Deal(session, AUTHORITY.trust, nodes).take("n00", answer)


def test_shares_that_do_not_open_are_reported_and_others_are_used() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 3, 3), nodes).until("mask")

    def ask(name, request):
        # On the way to n02, n00's shares change, and n01's commitment.
        if name == "n02":
            sealed, commitments = list(request["sealed"]), list(request["commitments"])
            sealed[request["senders"].index("n00")] = bytes(len(sealed[0]))
            i = request["senders"].index("n01")
            commitments[i] = flipped(commitments[i], 3)
            return {**request, "sealed": sealed, "commitments": commitments}
        return request

    play.step(ask=ask)
    assert set(play.answers["mask"]["n02"]["unreadable"]) == {"n00", "n01"}
    assert play.finish().is_right(nodes)
    assert not play.client_refused  # nobody is asked for what it could not read


def test_a_dealer_whose_shares_nobody_can_read_is_found_before_anything_is_revealed() -> None:
    play = Play(a_dealing(5, 3, 3), some(5)).until("mask")

    def ask(name, request):
        sealed = [
            bytes(len(text)) if sender == "n00" else text
            for sender, text in zip(request["senders"], request["sealed"], strict=True)
        ]
        return {**request, "sealed": sealed}

    with pytest.raises(Abandoned, match="'n00'") as caught:
        play.step(ask=ask)
    assert not caught.value.unmask_sent
    assert caught.value.culprit == "n00"


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_nodes_that_say_they_cannot_read_bring_nobody_down(liars) -> None:
    """Fewer than a third lie of one node's shares: it is suspected at most, and never named."""
    nodes = some(10)
    play = Play(a_dealing(10, least=7), nodes).until("mask")
    bad = [f"n0{i}" for i in range(1, 1 + liars)]

    def change(name: str, answer: Any) -> Any:
        if name not in bad:
            return answer
        answer = {**answer, "unreadable": ["n00"]}
        answer.pop("signature")
        return client._signed(answer, nodes[name])

    with pytest.raises(Abandoned) as caught:
        play.step(change=change, gone=["n07", "n08", "n09"])
    assert caught.value.suspect == "n00"
    assert caught.value.culprit is None


@pytest.mark.parametrize("gone", [(), ("n00",)], ids=["its seed", "its key"])
def test_a_dealer_of_shares_that_do_not_fit_is_named(gone, monkeypatch) -> None:
    """Each share is what was committed to, but they are not of one polynomial."""

    def crooked(secret, threshold, indices, source):
        return [bytes(1) + source(32) for _ in indices]

    play = Play(a_dealing(5, 3, 3), some(5)).until("share")
    requests = play.server.requests()
    for name, request in requests.items():
        with monkeypatch.context() as patch:
            if name == "n00":
                patch.setattr(client, "make_shares", crooked)
            play.server.take(name, play.answer(name, request))
    play.close()
    play.step(gone=gone)
    with pytest.raises(Abandoned, match="'n00' dealt shares that do not fit") as caught:
        play.finish()
    assert caught.value.unmask_sent
    assert caught.value.shares_received == 5 - len(gone)


# What a node refuses


def refuses(play: Play, name: str, request: Any, match: str) -> None:
    """The node refuses and is as it was; the right request is then still answered."""
    before = play.stored.get(name)
    with pytest.raises(Refused, match=match) as caught:
        play.answer(name, request)
    assert caught.value.name == name
    assert play.stored.get(name) == before


def test_a_node_refuses_neighbours_that_are_not_as_they_should_be() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 4, 3), nodes).until("share")
    request = play.server.requests()["n00"]
    lists = ("credentials", "publics", "signatures")

    def picked(places: Iterable[int]) -> dict[str, Any]:
        places = list(places)
        return {**request, **{key: [request[key][i] for i in places] for key in lists}}

    own = request["credentials"].index(nodes["n00"].credential.to_bytes())
    others = [i for i in range(5) if i != own]
    refuses(play, "n00", picked(others), "not among")
    refuses(play, "n00", picked(sorted([own, *others[:2]])), "from 4 to 3 nodes")
    refuses(play, "n00", picked([0, 1, 2, 3, 4, 4]), "twice")
    refuses(play, "n00", picked([1, 0, 2, 3, 4]), "out of order")
    for i, key in product(range(5), lists):
        if (i, key) == (own, "signatures"):
            continue  # its own signature it need not check
        changed = list(request[key])
        changed[i] = flipped(changed[i], len(changed[i]) // 2)
        refuses(play, "n00", {**request, key: changed}, "signature|this node")
    strange = Authority.make().enrol("n09", 1)
    _, answer = advertise(strange, play.dealing)
    new = {
        "credentials": [answer["credential"], *request["credentials"]],
        "publics": [answer["public"], *request["publics"]],
        "signatures": [answer["signature"], *request["signatures"]],
    }
    refuses(play, "n00", {**request, **new}, "credential")
    # Somebody with this node's name, enrolled by mistake.
    _, answer = advertise(AUTHORITY.enrol("n00", 1), play.dealing)
    new = {
        "credentials": [answer["credential"], *request["credentials"]],
        "publics": [answer["public"], *request["publics"]],
        "signatures": [answer["signature"], *request["signatures"]],
    }
    refuses(play, "n00", {**request, **new}, "not this node")
    # The keys of another session, honestly signed in that one.
    other = Play(a_dealing(5, 4, 3, number=1), nodes).until("share")
    replayed = {**other.server.requests()["n00"], "session": play.dealing.id}
    refuses(play, "n00", replayed, "signature|not this node")
    assert play.finish().is_right(nodes)


def test_a_sparse_node_refuses_more_neighbours_than_the_degree() -> None:
    play = Play(a_dealing(9, 3, 3, degree=4), some(9)).until("share")
    requests = play.server.requests()
    lists = ("credentials", "publics", "signatures")
    together = {key: sorted({*requests["n00"][key], *requests["n01"][key]}) for key in lists}
    refuses(play, "n00", {**requests["n00"], **together}, "from 3 to 5 nodes")


def test_a_node_masks_once_and_with_enough_neighbours_alone() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 4, 3), nodes).until("mask")
    request = play.server.requests()["n00"]
    few = {key: request[key][:2] for key in ("senders", "sealed", "commitments")}
    refuses(play, "n00", {**request, **few}, "only 3")
    garbled = [bytes(len(text)) for text in request["sealed"]]
    refuses(play, "n00", {**request, "sealed": garbled}, "only 1")
    # Shares for another node, or of another one, do not open.
    swapped = [*request["sealed"][1:], request["sealed"][0]]
    refuses(play, "n00", {**request, "sealed": swapped}, "only 1")
    refuses(play, "n00", play.server.requests()["n01"], "no neighbour")
    twice = ["n01", "n01", "n02", "n03"]
    refuses(play, "n00", {**request, "senders": twice}, "different")

    never: list[int] = []
    state = ClientState.from_bytes(play.stored["n00"])
    with pytest.raises(Refused):
        mask(state, {**request, **few}, lambda: never.append(1), nodes["n00"])  # type: ignore[arg-type]
    assert not never
    for wrong in (np.zeros(4, np.uint32), np.zeros(5, np.int64), [0] * 5):
        with pytest.raises(ValueError, match="5 numbers of type uint32"):
            mask(state, request, wrong, nodes["n00"])  # type: ignore[arg-type]
    with pytest.raises(Refused, match="identity"):
        mask(state, request, play.xs["n00"], nodes["n01"])

    play.answer("n00", request)
    refuses(play, "n00", request, "No step is done twice")


def test_a_node_consents_to_one_set_of_survivors_with_itself_and_enough_others() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 3, least=4), nodes).until("unmask")
    request = play.server.requests()["n00"]
    names = request["survivors"]
    refuses(play, "n00", {**request, "survivors": names[:3]}, "at least 4")
    refuses(play, "n00", {**request, "survivors": names[1:]}, "not among the survivors")
    refuses(play, "n00", {**request, "survivors": [*names, "n44"]}, "took no part")
    refuses(play, "n00", {**request, "survivors": ["n00"] * 5}, "different")
    refuses(play, "n00", {**request, "survivors": ["n00", "\ud800", "a", "b"]}, "encoded")
    refuses(play, "n00", play.answers["advertise"]["n00"], "place")
    first = play.answer("n00", request)
    assert play.answer("n00", request) == first
    shuffled = {**request, "survivors": names[::-1]}  # the same set
    assert play.answer("n00", shuffled) == first
    refuses(play, "n00", {**request, "survivors": names[:4]}, "other survivors")
    assert play.finish().is_right(nodes)


def test_a_node_reveals_nothing_where_fewer_than_t_survive_around_it() -> None:
    play = Play(a_dealing(9, 4, least=2, degree=6), some(9)).until("unmask")
    request = play.server.requests()["n00"]
    around = {one.name for one in ClientState.from_bytes(play.stored["n00"]).played.partners}
    far = sorted(set(some(9)) - around - {"n00"})
    near = sorted(around)[:2]
    refuses(play, "n00", {**request, "survivors": ["n00", *near, *far]}, "only 3 survived")


def revealed_by(play: Play, name: str) -> dict[str, bytes]:
    """The shares of a node that the server can open; Refused where it cannot."""
    server = play.server
    assert isinstance(server, Aggregation)
    before = {dealer: dict(shares) for dealer, shares in server._shares.items()}
    server._shares.clear()
    try:
        server._open(name, frozenset(server._revealed))
        return {dealer: next(iter(one.values())) for dealer, one in server._shares.items()}
    finally:
        server._shares.clear()
        server._shares.update(before)


@pytest.mark.parametrize("told", ["survivors", "broadcast"])
def test_a_server_that_tells_nodes_different_things_opens_nothing_of_the_fewer(told) -> None:
    """Of six nodes two are told otherwise than four, all of whom it takes; a seventh is gone."""
    nodes, few, gone = some(7), ("n04", "n05"), "n06"
    play = Play(a_dealing(7, 4, 4), nodes).until("mask")

    def otherwise(name: str, request: Any) -> Any:
        if name not in few:
            return request
        if told == "broadcast" and request["step"] == "mask":
            return {**request, "w": b"another model"}
        if told == "survivors" and request["step"] == "unmask":
            return {**request, "survivors": sorted(nodes)}
        return request

    play.step(ask=otherwise, gone=[gone])
    aggregation = play.server
    assert isinstance(aggregation, Aggregation)
    for name, request in aggregation.requests().items():
        answer = play.answer(name, otherwise(name, request))
        if name in few and told == "survivors":  # what a server that lies reads in it
            near = tuple(sorted(set(nodes) - {name}, key=lambda one: nodes[one].index))
            index = nodes[name].index
            found = server.read_revealed(play.session, name, index, near, 7, answer)
            aggregation._revealed[name] = found
            aggregation._taken[name] = b"", b""
        else:
            aggregation.take(name, answer)
    # Each one's answer alone is in order; what it holds opens with four that consent alike.
    for name in set(nodes) - {gone, *few}:
        assert len(revealed_by(play, name)) == 7
    for name in few:
        with pytest.raises(Refused, match="do not open: 2 nodes"):
            revealed_by(play, name)
    play.close()
    assert {refused.name for refused in play.refused} <= set(few)
    if told == "survivors":
        assert play.is_right(set(nodes) - {gone})
    else:
        # The masks of those two and the four do not cancel: what comes out is no sum.
        assert (play.total != sum(play.xs[name] for name in play.server.survivors)).all()


def test_a_server_that_tells_each_half_of_the_other_opens_nothing() -> None:
    nodes = some(6)
    halves = [["n00", "n01", "n02"], ["n03", "n04", "n05"]]
    play = Play(a_dealing(6, 3, 3), nodes).until("unmask")
    with pytest.raises(Abandoned, match="'unmask'"):
        play.step(
            ask=lambda name, request: {
                **request,
                "survivors": next([*half, "n00"] if name in half and name != "n00" and
                                  "n00" not in half else half for half in halves if name in half),
            }
        )  # fmt: skip
    assert isinstance(play.server, Aggregation)


def test_a_share_is_revealed_of_each_dealer_and_of_one_kind() -> None:
    nodes = some(6)
    play = Play(a_dealing(6, 4, 4), nodes).until("mask")
    play.step(gone=["n05"])
    held = {
        name: ClientState.from_bytes(play.stored[name]).played.held for name in play.server.asked
    }
    for name, request in play.server.requests().items():
        play.server.take(name, play.answer(name, request))
    for name, shares in held.items():
        found = revealed_by(play, name)
        assert found == {one.name: one.key if one.name == "n05" else one.seed for one in shares}
    play.close()
    assert play.is_right(set(nodes) - {"n05"})


@pytest.mark.parametrize("lie", ["sealed", "consents", "parts"])
@pytest.mark.parametrize("liars", [1, 2])
def test_a_node_that_reveals_nonsense_is_done_without_or_named(lie, liars) -> None:
    """It signs what does not open, or does not open for others."""
    nodes = some(6)
    play = Play(a_dealing(6, 5, 4), nodes).until("unmask")
    bad = sorted(nodes)[:liars]

    def change(name: str, answer: Any) -> Any:
        if name not in bad:
            return answer
        key = {"sealed": "revealed"}.get(lie, lie)
        answer = {**answer, key: bytes(len(answer[key]))}
        answer.pop("signature")
        return client._signed(answer, nodes[name])

    if liars == 1:
        play.step(change=change)
        assert play.is_right(nodes)
    else:
        with pytest.raises(Abandoned, match="shares of") as caught:
            play.step(change=change)
        # Where its own signature says so, the first of them is known.
        assert caught.value.culprit == (bad[0] if lie == "sealed" else None)
    assert {refused.name for refused in play.refused} <= set(nodes)


def test_what_a_node_was_not_dealt_it_cannot_reveal(monkeypatch) -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 5, 4), nodes).until("unmask")
    real = client._revealed

    def other(state, session, played, *more):
        held = [replace(one, seed=bytes(33)) for one in played.held]
        return real(state, session, replace(played, held=tuple(held)), *more)

    requests = play.server.requests()
    for name, request in requests.items():
        with monkeypatch.context() as patch:
            if name == "n02":
                patch.setattr(client, "_revealed", other)
            play.server.take(name, play.answer(name, request))
    with pytest.raises(Abandoned) as caught:
        play.close()
    assert caught.value.culprit == "n02"


# Nodes that are told of different nodes


def a_ghost(dealing: Dealing, nodes: dict[str, Identity], ghost: str) -> dict[str, Any]:
    """What a node advertised where it dropped out: the server has the key to it since."""
    play = Play(dealing, nodes).until("mask")
    play.step(gone=[ghost])
    play.step()
    assert play.is_right(set(nodes) - {ghost})
    assert isinstance(play.server, Aggregation)
    assert shamir.recovered(play.server._shares[ghost], dealing.threshold)
    return play.answers["advertise"][ghost]


def test_a_node_that_dropped_out_elsewhere_does_not_make_up_the_numbers() -> None:
    """A server deals the same dealing twice, opens the key of a node in one, and counts it in both.

    Nodes of the other one mask with that key, which the server can take off again: in the sum are
    fewer than `least`, though the names that survive are as many.
    """
    nodes, ghost, away = some(9), "n08", "n07"
    dealing = a_dealing(9, least=8)
    advert = a_ghost(dealing, nodes, ghost)
    play = Play(dealing, nodes)
    for name, request in play.server.requests().items():
        play.server.take(name, advert if name == ghost else play.answer(name, request))
    play.server.close_step()
    for name, request in play.server.requests().items():
        if name not in (ghost, away):
            play.server.take(name, play.answer(name, request))
    there = sorted(set(nodes) - {ghost, away})
    empty = dict.fromkeys(nodes, bytes(client.SEALED_BYTES))
    committed = dict.fromkeys(nodes, bytes(64))
    play.deal.dealt[ghost] = server.Dealt(nodes[ghost].index, empty, committed, bytes(32))
    play.deal._taken[ghost] = b"", b""
    play.server.close_step()
    assert isinstance(play.server, Deal)
    aggregation = play.server = Aggregation(play.deal, 0, SAID)
    for name, request in aggregation.requests().items():
        if name != ghost:
            play.server.take(name, play.answer(name, request))
            assert play.answers["mask"][name]["unreadable"] == [ghost]
    aggregation.step = "unmask"
    request = {**play.session.header("unmask"), "survivors": sorted([*there, ghost])}
    for name in there:
        refuses(play, name, request, "at least 8 .* but got 7")


def test_nodes_that_were_told_of_different_keys_have_none_in_common() -> None:
    nodes = some(5)
    other = Play(a_dealing(5), nodes)
    other.step()
    play = Play(a_dealing(5), nodes).until("share")

    def ask(name: str, request: Any) -> Any:
        if name != "n01":
            return request
        place = request["publics"].index(play.answers["advertise"]["n04"]["public"])
        changed = other.answers["advertise"]["n04"]
        publics, signatures = list(request["publics"]), list(request["signatures"])
        publics[place], signatures[place] = changed["public"], changed["signature"]
        return {**request, "publics": publics, "signatures": signatures}

    play.step(ask=ask)
    with pytest.raises(Abandoned, match="0 of those that hold shares of 'n01'"):
        play.step(gone=["n01"])
    for name in ("n00", "n02", "n03", "n04"):
        assert play.answers["mask"][name]["unreadable"] == ["n01"]


def test_steps_out_of_order_are_refused() -> None:
    nodes = some(4)
    play = Play(a_dealing(4), nodes)
    requests: dict[str, Any] = {}
    states: dict[str, ClientState] = {}
    while play.server.step != "done":
        step = play.server.step
        requests[step] = play.server.requests()["n00"]
        play.step()
        states[step] = ClientState.from_bytes(play.stored["n00"])
    steps: dict[str, Any] = {
        "share": lambda state: share(state, requests["share"], nodes["n00"]),
        "mask": lambda state: mask(state, requests["mask"], play.xs["n00"], nodes["n00"]),
        "unmask": lambda state: unmask(state, requests["unmask"], nodes["n00"]),
    }
    allowed = {("advertise", "share"), ("share", "mask"), ("mask", "unmask"), ("unmask", "unmask")}
    for (after, state), (step, do) in product(states.items(), steps.items()):
        if (after, step) in allowed:
            do(state)
        else:
            with pytest.raises(Refused, match=r"comes after|No step is done twice|no vector"):
                do(state)


# Many sessions of one dealing


def test_one_dealing_has_many_sums_whoever_is_there() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 3, 3, sessions=6), nodes)
    absent: list[set[str]] = [set(), {"n01"}, {"n02", "n03"}, set(), {"n04"}]
    for place, gone in zip((0, 1, 2, 4, 5), absent, strict=True):  # the fourth is passed over
        if place:
            play.again(place)
        play.xs = vectors(nodes, 5, place)
        play.until("mask").step(gone=gone)
        play.step(gone=list(gone)[:0])
        assert play.is_right(set(nodes) - gone)
    assert not play.client_refused


def test_who_cannot_be_reached_is_masked_without() -> None:
    nodes = some(5)
    play = Play(a_dealing(5, 3, 3, sessions=2), nodes).until("mask")
    play.server = Aggregation(play.deal, 0, SAID, {"n00", "n01", "n02", "n03", "n77"})
    assert sorted(play.server.requests()) == ["n00", "n01", "n02", "n03"]
    assert all("n04" not in one["senders"] for one in play.server.requests().values())
    assert play.finish().is_right(set(nodes) - {"n04"})
    with pytest.raises(Abandoned, match="dealt keys 2 can be reached"):
        Aggregation(play.deal, 1, SAID, {"n00", "n01"})


def test_a_session_that_was_played_or_passed_over_is_not_played() -> None:
    play = Play(a_dealing(4, sessions=3), some(4)).until("mask")
    first = play.server.requests()["n00"]
    later = Aggregation(play.deal, 1, SAID).requests()["n00"]
    play.answer("n00", later)
    refuses(play, "n00", first, "passed over")
    refuses(play, "n00", later, "No step is done twice")
    refuses(play, "n00", {**later, "place": 2}, "another session")
    refuses(play, "n00", {**later, "place": 3}, "none at 3")
    refuses(play, "n00", {**later, "place": True}, "'place'")
    # The shares that were sealed for one session do not open in another.
    last = Aggregation(play.deal, 2, SAID).requests()["n00"]
    shares = {key: later[key] for key in ("sealed", "commitments")}
    refuses(play, "n00", {**last, **shares}, "only 1 came")


def test_consents_of_one_session_are_nothing_in_another() -> None:
    nodes = some(4)
    play = Play(a_dealing(4, 3, 3, sessions=2), nodes).finish()
    old = play.answers["unmask"]
    play.again(1).until("unmask")
    for name in play.server.requests():
        replayed = {**old[name], **play.session.header("unmask")}
        for answer in (old[name], replayed):
            with pytest.raises(Refused, match=r"session|signature"):
                play.server.take(name, answer)
    assert play.finish().is_right(nodes)


def test_every_session_has_keys_of_its_own(monkeypatch) -> None:
    """All that is derived, masked with or sealed with in one dealing: no key twice by one node."""
    used: list[bytes] = []
    real_seal, real_mask = client.seal, client.add_mask
    monkeypatch.setattr(
        client, "seal", lambda key, *more: (used.append(key), real_seal(key, *more))[1]
    )
    monkeypatch.setattr(
        client, "add_mask", lambda x, key, sign: (used.append(key), real_mask(x, key, sign))[1]
    )
    play = Play(a_dealing(3, sessions=4), some(3)).finish()
    for place in (1, 2, 3):
        play.again(place).finish()
    counts = {key: used.count(key) for key in used}
    # Shares are sealed both ways under one key, and a mask is added and subtracted; no more.
    assert max(counts.values()) == 2
    pairs, sessions = 3, 4
    assert sum(count == 2 for count in counts.values()) == 2 * pairs * sessions


def test_a_state_says_nothing_about_sessions_that_are_past() -> None:
    """With all that a node keeps after three sessions, shares sealed for them do not open."""
    play = Play(a_dealing(4, 3, 3, sessions=4), some(4)).until("mask")
    before = play.stored["n00"]
    passed = play.server.requests()["n00"]
    for place in (0, 1, 2):
        if place:
            play.again(place)
        play.finish()
    state = ClientState.from_bytes(play.stored["n00"])
    assert (state.next, len(state.secrets), {len(peer.masking) for peer in state.peers}) == (
        3, 1, {32},
    )  # fmt: skip
    rolled_back = replace(state, next=0, secrets=state.secrets * 4)
    rolled_back = replace(
        rolled_back, peers=tuple(replace(one, masking=one.masking * 4) for one in state.peers)
    )
    with pytest.raises(Refused, match="only 1 came"):
        mask(rolled_back, passed, play.xs["n00"], play.nodes["n00"])
    mask(ClientState.from_bytes(before), passed, play.xs["n00"], play.nodes["n00"])


# What is signed and hashed

MESSAGES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.binary(max_size=9) | st.text(max_size=9)
    | st.floats(allow_nan=False),
    lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=4), one, max_size=4),
    max_leaves=12,
)  # fmt: skip


def typed(value: Any) -> Any:
    """What is told apart: 1, 1.0 and True, and 0.0 and -0.0."""
    if isinstance(value, list):
        return ("list", tuple(map(typed, value)))
    if isinstance(value, dict):
        return ("dict", tuple(sorted((key, typed(one)) for key, one in value.items())))
    return (type(value).__name__, repr(value))


@given(MESSAGES, MESSAGES)
@settings(max_examples=300)
def test_different_messages_never_share_an_encoding(one, other) -> None:
    a, b = encoding.encode(one), encoding.encode(other)
    assert (a == b) == (typed(one) == typed(other))
    assert typed(encoding.decode(a)) == typed(one)
    # Nor is one the beginning of another, so that a row of them can be cut in one way only.
    assert a == b or not a.startswith(b)


def test_encodings_that_are_nearly_the_same_differ() -> None:
    values: list[Any] = [
        1, 1.0, True, "1", b"1", [1], [[1]], None, "", b"", [], {}, 0, 0.0, -0.0, False, -1, 255,
        256, -128, -129, 2**64, "None", "True", ["a", "b"], ["ab"], ["a", ["b"]], [b"a", b"b"],
        [b"ab", b""], {"a": "b"}, {"a": ["b"]}, ["a", "b", "c"], {"a": 1, "b": 2}, {"b": 1, "a": 2},
    ]  # fmt: skip
    assert len({encoding.encode(value) for value in values}) == len(values)
    assert encoding.encode({"a": 1, "b": 2}) == encoding.encode({"b": 2, "a": 1})
    with pytest.raises(Invalid, match="cannot hold a set"):
        encoding.encode([{1}])


@given(st.binary(max_size=40))
@settings(max_examples=200)
def test_bytes_are_read_as_they_would_be_written_or_not_at_all(data) -> None:
    try:
        value = encoding.decode(data)
    except Invalid:
        return
    assert encoding.encode(value) == data


def test_bytes_that_nothing_writes_are_invalid() -> None:
    good = encoding.encode({"a": 5, "b": [b"xyz", 1.5, None, True]})
    assert encoding.decode(good) == {"a": 5, "b": [b"xyz", 1.5, None, True]}
    for i in range(len(good)):
        with pytest.raises(Invalid):
            encoding.decode(good[:i])
    for bad in (
        good + b"x",
        b"i" + (2).to_bytes(8, "big") + b"\0\5",  # five in two bytes
        b"t" + (1).to_bytes(8, "big") + b"\2",
        b"l" + b"\xff" * 8,
        b"l\0\0\0\0\0\0\0\1" * 5000,
        b"d" + (2).to_bytes(8, "big") + encoding.encode("b") * 2 + encoding.encode("a") * 2,
    ):
        with pytest.raises(Invalid):
            encoding.decode(bad)


# State


def test_a_state_keeps_only_what_later_steps_need() -> None:
    play = Play(a_dealing(5, 3, 3), some(5))
    states: dict[str, ClientState] = {}
    while play.server.step != "done":
        step = play.server.step
        play.step(gone=["n04"] if step == "mask" else [])
        states[step] = ClientState.from_bytes(play.stored["n00"])
        assert ClientState.from_bytes(states[step].to_bytes()) == states[step]
    first, shared, masked, done = (states[step] for step in STEPS)
    assert first.channel not in shared.to_bytes()
    (own,) = shared.secrets
    for secret in (own.masking, own.seed, *(peer.chain for peer in shared.peers)):
        assert len(secret) in (32, 64)
        assert secret not in masked.to_bytes()
    assert masked.played is not None
    for one in masked.played.held:
        assert one.key in masked.to_bytes()
        assert one.key not in done.to_bytes()
        assert one.seed not in done.to_bytes()
    assert done.played is not None
    assert done.played.held == done.played.partners == ()
    for secret in (own.masking, first.channel, own.seed):
        assert repr(secret) not in repr(states)


@pytest.mark.parametrize("cut", [0, 1, 10, 100])
def test_bytes_that_are_no_state_or_identity_are_invalid(cut) -> None:
    play = Play(a_dealing(4), some(4)).until("mask")
    for kind, data in (
        (ClientState, play.stored["n00"]),
        (Identity, some(1)["n00"].to_bytes()),
        (Dealing, play.dealing.to_bytes()),
    ):
        with pytest.raises(Invalid):
            kind.from_bytes(data[: -1 - cut])
    with pytest.raises(Invalid):
        ClientState.from_bytes(some(1)["n00"].to_bytes())


def test_an_identity_whose_parts_do_not_belong_together_is_invalid() -> None:
    one, two = some(2).values()
    with pytest.raises(Invalid, match="signing key"):
        Identity.from_bytes(replace(one, signing=two.signing).to_bytes())
    with pytest.raises(Invalid, match="signature"):
        Identity.from_bytes(replace(one, authority=Authority.make().trust).to_bytes())
    assert Identity.from_bytes(one.to_bytes()) == one
    assert repr(one.signing) not in repr(one)


@pytest.mark.parametrize(
    ("name", "index"), [("", 1), ("x" * 65, 1), ("a\nb", 1), ("x", 0), ("x", 2**32)]
)
def test_names_and_indices_that_cannot_be_enrolled(name, index) -> None:
    with pytest.raises(ValueError, match="must"):
        AUTHORITY.enrol(name, index)


def test_the_same_random_bytes_give_the_same_messages() -> None:
    nodes = some(3)
    session = a_dealing(3)

    def source(seed: int) -> primitives.ByteSource:
        return np.random.default_rng(seed).bytes

    def first_two(seed: int) -> list[Any]:
        server = Deal(session, AUTHORITY.trust, nodes)
        states, answers = {}, []
        for i, name in enumerate(nodes):
            states[name], answer = advertise(nodes[name], session, source(seed + i))
            server.take(name, answer)
            answers.append(answer)
        server.close_step()
        requests = server.requests()
        for i, name in enumerate(nodes):
            answers.append(share(states[name], requests[name], nodes[name], source(seed - i))[1])
        return answers

    assert first_two(50) == first_two(50)
    assert first_two(50) != first_two(60)


# Sessions


def test_a_dealing_travels_and_its_id_is_of_all_of_it() -> None:
    session = a_dealing(9, 3, 2, degree=4)
    assert Dealing.from_message(session.to_message()) == session
    assert Dealing.from_bytes(session.to_bytes()) == session
    changes = {"run": b"x", "number": 9, "sessions": 9, "size": 9, "threshold": 2, "least": 9}
    others = [replace(session, **{name: value}) for name, value in changes.items()]
    others += [replace(session, degree=None), replace(session, degree=6)]
    assert len({one.id for one in (session, *others)}) == 1 + len(others)
    for name in changes:
        message = {**session.to_message(), name: changes[name]}
        with pytest.raises(Invalid, match="another session"):
            Dealing.from_message(message)
    with pytest.raises(Invalid):
        Dealing.from_message({**session.to_message(), "size": True})
    with pytest.raises(Invalid):
        Dealing.from_message({})


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"threshold": 0}, {"least": 0}, {"number": -1}, {"degree": 3}, {"degree": 2},
     {"run": "text"}, {"size": 2.0}, {"sessions": 0}, {"sessions": 5000}],
)  # fmt: skip
def test_settings_that_make_no_dealing(wrong) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(a_dealing(9, 3, 2, degree=4), **wrong)


def test_messages_hold_what_a_flower_record_can() -> None:
    app = pytest.importorskip("flwr.app")
    play = Play(a_dealing(4, 3, 3), some(4))
    while play.server.step != "done":
        for request in play.server.requests().values():
            assert dict(app.ConfigRecord(request)) == request
        step = play.server.step
        play.step(gone=["n03"] if step == "mask" else ())
        for answer in play.answers[step].values():
            assert dict(app.ConfigRecord(answer)) == answer


# Shamir


def is_prime(n: int) -> bool:
    """Miller and Rabin's test for fifty bases: wrong with a probability below 4⁻⁵⁰."""
    twos = ((n - 1) & -(n - 1)).bit_length() - 1
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = pow(int.from_bytes(rng.bytes(32), "big") % (n - 3) + 2, (n - 1) >> twos, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def test_the_field_is_the_first_prime_above_all_secrets() -> None:
    assert is_prime(shamir.PRIME)
    assert not any(is_prime(n) for n in range(2**256 + 1, shamir.PRIME, 2))


@given(st.binary(min_size=32, max_size=32), st.data())
@settings(max_examples=60)
def test_any_t_shares_give_the_secret(secret, data) -> None:
    indices = data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=40, unique=True))
    t = data.draw(st.integers(1, len(indices)))
    shares = dict(zip(indices, shamir.make_shares(secret, t, indices), strict=True))
    chosen = data.draw(st.permutations(indices))[:t]
    assert shamir.combine_shares({x: shares[x] for x in chosen}) == secret


def test_fewer_than_t_shares_say_nothing() -> None:
    """For t − 1 shares and any secret there is exactly one polynomial: shown by adding a share."""
    indices = [3, 8, 20]
    shares = dict(zip(indices, shamir.make_shares(bytes(32), 3, indices), strict=True))
    two = {x: shamir.read_share(shares[x]) for x in indices[:2]}
    weights = shamir._weights((3, 8, 20))
    for secret in (0, 1, 2**256 - 1, 12345):
        rest = secret - sum(w * y for w, y in zip(weights, two.values(), strict=False))
        third = rest * pow(weights[2], -1, shamir.PRIME) % shamir.PRIME
        whole = {**{x: shares[x] for x in two}, 20: third.to_bytes(33, "big")}
        assert int.from_bytes(shamir.combine_shares(whole), "big") == secret


@pytest.mark.parametrize(
    ("secret", "t", "indices"),
    [(bytes(31), 1, [1]), (bytes(32), 0, [1]), (bytes(32), 3, [1, 2]), (bytes(32), 1, [0]),
     (bytes(32), 1, [2, 2]), (bytes(32), 1, [2**32])],
)  # fmt: skip
def test_what_cannot_be_shared(secret, t, indices) -> None:
    with pytest.raises(ValueError, match="must"):
        shamir.make_shares(secret, t, indices)


@pytest.mark.parametrize("share", [b"", bytes(32), b"\xff" * 33, shamir.PRIME.to_bytes(33, "big")])
def test_what_is_no_share(share) -> None:
    with pytest.raises(Invalid, match="share"):
        shamir.combine_shares({1: share})


# The graph


def test_the_graph_is_regular_symmetric_and_depends_on_names_keys_and_session() -> None:
    keys = {name: bytes([i]) * 64 for i, name in enumerate(everybody())}
    session = a_dealing(60, 5, degree=8)
    found = graph.neighbours(session, keys)
    assert found == graph.neighbours(session, dict(reversed(keys.items())))
    for name, circle in found.items():
        assert name in circle
        assert len(circle) == 9
        assert all(name in found[other] for other in circle)
    assert found != graph.neighbours(session, {**keys, "n00": b"k" * 64})
    assert found != graph.neighbours(replace(session, number=1), keys)
    assert all(len(circle) == 9 for circle in graph.neighbours(session, some_keys(9)).values())
    whole = graph.neighbours(replace(session, degree=None), keys)
    assert all(len(circle) == 60 for circle in whole.values())


def some_keys(n: int) -> dict[str, bytes]:
    return {name: name.encode() * 8 for name in some(n)}


def test_the_order_is_uniform() -> None:
    """Which neighbour n00 has: each of 11 with probability 2/11, over 2,200 sessions.

    χ² with 10 degrees of freedom exceeds 45 with a probability of 2·10⁻⁶ (the two neighbours of one
    session exclude each other, which makes it smaller).
    """
    session = a_dealing(12, 2, degree=2)
    counts = dict.fromkeys(list(some(12))[1:], 0)
    for i in range(2200):
        for name in graph.neighbours(replace(session, number=i), some_keys(12))["n00"] - {"n00"}:
            counts[name] += 1
    assert sum((count - 400) ** 2 / 400 for count in counts.values()) < 45


@pytest.mark.parametrize("n", [60, 200, 1000])
@pytest.mark.parametrize(("c", "d"), [(0.05, 0.05), (0.1, 0.05), (0.2, 0.1), (0.33, 0.1)])
def test_the_chosen_graph_keeps_to_its_bounds_and_is_the_smallest(n, c, d) -> None:
    bad, gone = int(c * n), int(d * n)

    def tail(marked: int, k: int, fewest: int) -> float:
        """P[at least so many of k neighbours are marked], summed directly."""
        ways = sum(
            comb(marked, i) * comb(n - 1 - marked, k - i) for i in range(max(fewest, 0), k + 1)
        )
        return ways / comb(n - 1, k)

    def holds(k: int, t: int) -> bool:
        apart = 1.0
        for i in range(k):
            apart *= max(bad + gone - i, 0) / (n - i)
        return (
            n * tail(bad, k, t) <= 2**-41
            and n * (n - 1) / 2 * apart <= 2**-41
            and n * tail(gone, k, k - t + 1) <= 2**-20
        )

    choice = choose_graph(n, bad, gone, complete_up_to=50)
    assert choice.degree is not None
    assert holds(choice.degree, choice.threshold)
    assert not holds(choice.degree, choice.threshold + 1)
    assert not any(holds(choice.degree - 2, t) for t in range(2, choice.degree))
    a_dealing(n, choice.threshold, degree=choice.degree)


def test_few_nodes_are_all_neighbours_and_too_few_are_an_error() -> None:
    assert choose_graph(30, 5, 5) == graph.GraphChoice(None, 21)
    assert choose_graph(3, 0, 0) == graph.GraphChoice(None, 3)
    with pytest.raises(ValueError, match="too few"):
        choose_graph(30, 5, 12)
    with pytest.raises(ValueError, match="fewer than two honest"):
        choose_graph(10, 5, 4)
    with pytest.raises(ValueError, match="whole number"):
        choose_graph(10, -1, 4)


def test_survivors_fall_apart_only_where_as_many_as_the_degree_are_gone() -> None:
    """The bound counts two runs of k/2 nodes; a look at 3,000 random sets of survivors agrees."""
    session = a_dealing(14, 2, degree=4)
    rng = np.random.default_rng(0)
    circle = graph.neighbours(session, some_keys(14))
    for _ in range(3000):
        left = {str(name) for name in rng.choice(list(circle), rng.integers(2, 14), replace=False)}
        seen, todo = set(), [min(left)]
        while todo:
            seen.add(name := todo.pop())
            todo += [one for one in circle[name] if one in left and one not in seen]
        if seen != left:
            assert len(circle) - len(left) >= 4


# Credentials


def test_a_right_credential_is_checked_once_a_process(monkeypatch) -> None:
    data = AUTHORITY.enrol("fresh", 77).credential.to_bytes()
    calls = []
    real = certificates.check_signature
    monkeypatch.setattr(certificates, "check_signature", lambda *a: (calls.append(1), real(*a)))
    stranger = Authority.make().trust
    identity._authority.cache_clear()
    Credential.verified(data, AUTHORITY.trust)
    assert len(calls) == 2  # the authority's own certificate, too
    Credential.verified(data, AUTHORITY.trust)
    assert len(calls) == 2
    for _ in range(2):  # a wrong one is never remembered as right
        with pytest.raises(Invalid):
            Credential.verified(data, stranger)
    assert len(calls) == 2 + 3  # the stranger's own certificate, once
