"""Secure aggregation: the right sum or none, whoever drops out, lies, or asks for too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement, pairwise, product
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfl.federation.secagg import (
    STEPS,
    Abandoned,
    Aggregation,
    Authority,
    ClientState,
    Credential,
    Identity,
    Invalid,
    Refused,
    Session,
    advertise,
    certificates,
    choose_graph,
    client,
    consent,
    graph,
    identity,
    mask,
    primitives,
    shamir,
    share,
    transcript,
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


def a_session(
    n: int, t: int | None = None, least: int = 1, degree: int | None = None, **more: Any
) -> Session:
    settings = {"run": b"run", "round": 3, "attempt": 0, "size": 5, **more}
    return Session(**settings, threshold=t or 2 * n // 3 + 1, least=least, degree=degree)


def vectors(names: Iterable[str], size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**32, size, dtype=np.uint32) for name in names}


class Play:
    """A whole session in one process, with every state stored as bytes between two steps."""

    def __init__(self, session: Session, nodes: dict[str, Identity], xs: dict | None = None):
        self.session, self.nodes = session, nodes
        self.xs = xs or vectors(nodes, session.size)
        self.server = Aggregation(session, AUTHORITY.trust, nodes)
        self.stored: dict[str, bytes] = {}
        self.client_refused: dict[str, str] = {}
        self.answers: dict[str, dict[str, Any]] = {step: {} for step in STEPS}

    def answer(self, name: str, request: Any) -> Any:
        """What a node answers in the current step; its state goes on."""
        identity = Identity.from_bytes(self.nodes[name].to_bytes())
        step = self.server.step
        if step == "advertise":
            state, answer = advertise(identity, Session.from_message(request))
        else:
            state = ClientState.from_bytes(self.stored[name])
            if step == "share":
                state, answer = share(state, request, identity)
            elif step == "mask":
                state, answer = mask(state, request, lambda: self.xs[name], identity)
            elif step == "consent":
                state, answer = consent(state, request, identity)
            else:
                state, answer = unmask(state, request)
        self.stored[name] = state.to_bytes()
        self.answers[step][name] = answer
        return answer

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
        self.server.close_step()

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
        return bool((self.server.total() == expected).all())


def run_with_leavers(play: Play, leaves: dict[str, int]) -> Abandoned | None:
    """Each node falls silent from the step of this number on."""
    try:
        for i in range(len(STEPS)):
            play.step(gone=[name for name, at in leaves.items() if at <= i])
    except Abandoned as abandoned:
        return abandoned
    return None


def outcome(session: Session, leaves: dict[str, int]) -> tuple[str | None, list[str]]:
    """The step at which the complete graph has to give up, and who survives otherwise."""
    there = [sorted(name for name, at in leaves.items() if at > i) for i in range(len(STEPS))]
    t, least = session.threshold, session.least
    needed = (max(t, least), max(t, least), max(t, least), t, t)
    for step, names, fewest in zip(STEPS, there, needed, strict=True):
        if len(names) < fewest:
            return step, []
    return None, there[2]


def check_leavers(session: Session, nodes: dict[str, Identity], leaves: dict[str, int]) -> None:
    play = Play(session, nodes)
    abandoned = run_with_leavers(play, leaves)
    step, survivors = outcome(session, leaves)
    assert (abandoned is None) == (step is None), (leaves, abandoned)
    if abandoned is None:
        assert play.is_right(survivors)
        for i, name in enumerate(STEPS):
            assert set(play.server.dropped[name]) == {one for one, at in leaves.items() if at == i}
    else:
        assert f"{step!r}" in abandoned.reason
        assert abandoned.unmask_sent == (step == "unmask")
        came = sum(at > 4 for at in leaves.values()) if step == "unmask" else 0
        assert abandoned.shares_received == came
        with pytest.raises(ValueError, match="no sum"):
            play.server.total()


# The right sum, or none


@pytest.mark.parametrize(("t", "least"), [(2, 1), (2, 3), (3, 2)])
def test_every_way_of_dropping_out_of_three(t, least) -> None:
    nodes = some(3)
    for when in product(range(NEVER + 1), repeat=3):
        check_leavers(a_session(3, t, least), nodes, dict(zip(nodes, when, strict=True)))


def test_every_number_of_drop_outs_at_every_step_of_four() -> None:
    """All 126 ways up to who is who; who is who differs from one to the next."""
    rng = np.random.default_rng(0)
    for when in combinations_with_replacement(range(NEVER + 1), 4):
        names = rng.permutation(list(some(4)))
        leaves = {str(name): at for name, at in zip(names, when, strict=True)}
        check_leavers(a_session(4, 2, 2), some(4), leaves)


@given(st.data())
@settings(max_examples=40)
def test_the_sum_is_right_for_random_cohorts(data) -> None:
    n = data.draw(st.integers(2, 8))
    t, least = data.draw(st.integers(1, n)), data.draw(st.integers(1, n))
    size = data.draw(st.sampled_from([1, 3, 40, 17_000]))
    at = st.integers(0, NEVER + 8).map(lambda i: min(i, NEVER))
    leaves = {name: data.draw(at) for name in some(n)}
    check_leavers(a_session(n, t, least, size=size), some(n), leaves)


def test_nobody_drops_out_and_extreme_numbers_wrap_around() -> None:
    nodes = some(5)
    xs = {name: np.full(5, 2**32 - 1, np.uint32) for name in nodes}
    play = Play(a_session(5), nodes, xs).finish()
    assert play.server.total().tolist() == [2**32 - 5] * 5
    assert play.server.total().dtype == np.uint32


@pytest.mark.parametrize("seed", range(3))
def test_a_sparse_graph_of_sixty(seed) -> None:
    rng = np.random.default_rng(seed)
    names = rng.permutation(list(everybody()))
    leaves = dict.fromkeys(everybody(), NEVER) | {str(names[i]): i for i in range(5)}
    play = Play(a_session(60, 7, least=50, degree=12), everybody())
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
    play = Play(a_session(12, 3, least=4, degree=4), nodes)
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
    play = Play(a_session(12, 3, least=2, degree=4), nodes).until("share")
    alone = "n03"
    circle = graph.neighbours(
        play.session, {name: play.answers["advertise"][name]["public"] for name in nodes}
    )[alone]
    play.step(gone=sorted(circle - {alone})[:3])
    assert alone in play.server.dropped["share"]
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
    play = Play(a_session(4, 3, 3), nodes).until(step)
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
    play.server.close_step()
    assert bad in play.server.dropped[step]
    play.finish()
    assert play.is_right(sorted(set(nodes) - {bad}) if step in STEPS[:3] else nodes)
    assert {refused.name for refused in play.server.refused} == {bad}


@pytest.mark.parametrize("step", STEPS)
def test_a_right_answer_after_a_wrong_one_counts_and_the_same_again_is_harmless(step) -> None:
    play = Play(a_session(4), some(4)).until(step)
    requests = play.server.requests()
    for name, request in requests.items():
        answer = play.answer(name, request)
        with pytest.raises(Refused, match="session"):
            play.server.take(name, {**answer, "session": bytes(32)})
        play.server.take(name, answer)
        play.server.take(name, dict(answer))
        with pytest.raises(Refused, match="before"):
            play.server.take(name, {**answer, "more": 1})
    play.server.close_step()
    assert play.finish().is_right(some(4))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("other", [{"round": 4}, {"attempt": 1}, {"run": b"another"}])
def test_answers_of_another_session_are_refused(step, other) -> None:
    nodes = some(4)
    old = Play(a_session(4, 3, 3, **other), nodes).finish()
    play = Play(a_session(4, 3, 3), nodes).until(step)
    replayed = old.answers[step]["n01"]
    # Even if somebody writes the new session's id over the old one.
    relabelled = {**replayed, "session": play.session.id}
    requests = play.server.requests()
    for answer in (replayed, relabelled):
        with pytest.raises(Refused, match="n01"):
            play.server.take("n01", answer)
    for name in sorted(set(nodes) - {"n01"}):
        play.server.take(name, play.answer(name, requests[name]))
    play.server.close_step()
    assert play.finish().is_right(None)


@pytest.mark.parametrize("step", STEPS)
def test_answers_of_other_nodes_and_other_steps_are_refused(step) -> None:
    nodes = some(4)
    play = Play(a_session(4, 3, 3), nodes).until(step)
    requests = play.server.requests()
    answers = {name: play.answer(name, request) for name, request in requests.items()}
    with pytest.raises(Refused, match="n00"):
        play.server.take("n00", answers["n01"])
    for earlier in STEPS[: STEPS.index(step)]:
        with pytest.raises(Refused, match="step"):
            play.server.take("n00", play.answers[earlier]["n00"])
    with pytest.raises(Refused, match="n55: it was not asked"):
        play.server.take("n55", answers["n01"])
    for name, answer in answers.items():
        play.server.take(name, answer)
    play.server.close_step()
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
    session = a_session(5, 1, 1)
    server = Aggregation(session, AUTHORITY.trust, nodes)
    server.take("n04", advertise(nodes["n04"], session)[1])
    for name, wrong in (("n00", stranger), ("n01", thief), ("n02", renamed), ("n03", double)):
        with pytest.raises(Refused, match=name):
            server.take(name, advertise(wrong, session)[1])
    with pytest.raises(Refused, match="for 'n01'"):
        server.take("n00", advertise(nodes["n01"], session)[1])
    server.close_step()
    assert server.dropped["advertise"] == ("n00", "n01", "n02", "n03")


def test_keys_of_small_order_are_refused_though_they_are_signed(monkeypatch) -> None:
    session = a_session(3)
    nodes = some(3)
    monkeypatch.setattr(client, "public_of", lambda secret: bytes(32))
    _, answer = advertise(nodes["n00"], session)
    with pytest.raises(Refused, match="small order"):
        Aggregation(session, AUTHORITY.trust, nodes).take("n00", answer)


def test_shares_that_do_not_open_are_reported_and_others_are_used() -> None:
    nodes = some(5)
    play = Play(a_session(5, 3, 3), nodes).until("mask")

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
    play = Play(a_session(5, 3, 3), some(5)).until("mask")

    def ask(name, request):
        sealed = [
            bytes(len(text)) if sender == "n00" else text
            for sender, text in zip(request["senders"], request["sealed"], strict=True)
        ]
        return {**request, "sealed": sealed}

    with pytest.raises(Abandoned, match="'n00'") as caught:
        play.step(ask=ask)
    assert not caught.value.unmask_sent


@pytest.mark.parametrize("gone", [(), ("n00",)], ids=["its seed", "its key"])
def test_a_dealer_of_shares_that_do_not_fit_is_named(gone, monkeypatch) -> None:
    """Each share is what was committed to, but they are not of one polynomial."""

    def crooked(secret, threshold, indices, source):
        return [bytes(1) + source(32) for _ in indices]

    play = Play(a_session(5, 3, 3), some(5)).until("share")
    requests = play.server.requests()
    for name, request in requests.items():
        with monkeypatch.context() as patch:
            if name == "n00":
                patch.setattr(client, "make_shares", crooked)
            play.server.take(name, play.answer(name, request))
    play.server.close_step()
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
    play = Play(a_session(5, 4, 3), nodes).until("share")
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
    _, answer = advertise(strange, play.session)
    new = {
        "credentials": [answer["credential"], *request["credentials"]],
        "publics": [answer["public"], *request["publics"]],
        "signatures": [answer["signature"], *request["signatures"]],
    }
    refuses(play, "n00", {**request, **new}, "credential")
    # Somebody with this node's name, enrolled by mistake.
    _, answer = advertise(AUTHORITY.enrol("n00", 1), play.session)
    new = {
        "credentials": [answer["credential"], *request["credentials"]],
        "publics": [answer["public"], *request["publics"]],
        "signatures": [answer["signature"], *request["signatures"]],
    }
    refuses(play, "n00", {**request, **new}, "not this node")
    # The keys of another session, honestly signed in that one.
    other = Play(a_session(5, 4, 3, attempt=1), nodes).until("share")
    replayed = {**other.server.requests()["n00"], "session": play.session.id}
    refuses(play, "n00", replayed, "signature|not this node")
    assert play.finish().is_right(nodes)


def test_a_sparse_node_refuses_more_neighbours_than_the_degree() -> None:
    play = Play(a_session(9, 3, 3, degree=4), some(9)).until("share")
    requests = play.server.requests()
    lists = ("credentials", "publics", "signatures")
    together = {key: sorted({*requests["n00"][key], *requests["n01"][key]}) for key in lists}
    refuses(play, "n00", {**requests["n00"], **together}, "from 3 to 5 nodes")


def test_a_node_masks_once_and_with_enough_neighbours_alone() -> None:
    nodes = some(5)
    play = Play(a_session(5, 4, 3), nodes).until("mask")
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
    refuses(play, "n00", request, "no step is done twice")


def test_a_node_signs_one_set_of_survivors_with_itself_and_enough_others() -> None:
    nodes = some(5)
    play = Play(a_session(5, 3, least=4), nodes).until("consent")
    request = play.server.requests()["n00"]
    names = request["survivors"]
    refuses(play, "n00", {**request, "survivors": names[:3]}, "at least 4")
    refuses(play, "n00", {**request, "survivors": names[1:]}, "not among the survivors")
    refuses(play, "n00", {**request, "survivors": [*names, "n44"]}, "took no part")
    refuses(play, "n00", {**request, "survivors": ["n00"] * 5}, "different")
    refuses(play, "n00", {**request, "survivors": ["n00", "\ud800", "a", "b"]}, "encoded")
    refuses(play, "n00", play.answers["advertise"]["n00"], "step")
    first = play.answer("n00", request)
    assert play.answer("n00", request) == first
    shuffled = {**request, "survivors": names[::-1]}  # the same set
    assert play.answer("n00", shuffled) == first
    refuses(play, "n00", {**request, "survivors": names[:4]}, "other survivors")


def test_a_node_reveals_one_share_of_each_and_only_after_enough_signatures() -> None:
    nodes = some(6)
    play = Play(a_session(6, 4, 4), nodes).until("mask")
    play.step(gone=["n05"])
    play.step()
    request = play.server.requests()["n00"]
    assert request["keys"] == ["n05"]
    assert len(request["signers"]) == 3
    # Too few signatures, somebody's twice, its own, the drop-out's.
    fewer = {key: request[key][:2] for key in ("signers", "signatures")}
    refuses(play, "n00", {**request, **fewer}, "4 nodes must have signed")
    a, b, _ = request["signers"]
    refuses(play, "n00", {**request, "signers": [a, b, a]}, "different")
    refuses(play, "n00", {**request, "signers": [a, b, "n00"]}, "no neighbour that survived")
    refuses(play, "n00", {**request, "signers": [a, b, "n05"]}, "no neighbour that survived")
    swapped = request["signatures"][::-1]
    refuses(play, "n00", {**request, "signatures": swapped}, "signature")
    # Signatures of other survivors.
    other = transcript.survived(play.session, [*play.server.survivors, "n05"])
    forged = [primitives.sign(nodes[name].signing, other) for name in request["signers"]]
    refuses(play, "n00", {**request, "signatures": forged}, "signature")
    # Both shares of one, or the wrong one.
    refuses(play, "n00", {**request, "keys": ["n05", "n01"]}, "not to be had")
    refuses(play, "n00", {**request, "seeds": [*request["seeds"], "n05"]}, "not to be had")
    refuses(play, "n00", {**request, "keys": ["n05", "n00"]}, "not to be had")
    refuses(play, "n00", {**request, "keys": ["n05", "n44"]}, "not to be had")
    answer = play.answer("n00", request)
    assert play.answer("n00", request) == answer
    refuses(play, "n00", {**request, "keys": []}, "another request")
    refuses(play, "n00", play.answers["consent"]["n00"], "step")


def test_steps_out_of_order_are_refused() -> None:
    nodes = some(4)
    play = Play(a_session(4), nodes)
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
        "consent": lambda state: consent(state, requests["consent"], nodes["n00"]),
        "unmask": lambda state: unmask(state, requests["unmask"]),
    }
    allowed = set(pairwise(STEPS))
    allowed |= {("consent", "consent"), ("unmask", "unmask")}
    for (after, state), (step, do) in product(states.items(), steps.items()):
        if (after, step) in allowed:
            do(state)
        else:
            with pytest.raises(Refused, match="comes after"):
                do(state)


# State


def test_a_state_keeps_only_what_later_steps_need() -> None:
    play = Play(a_session(5, 3, 3), some(5))
    states: dict[str, ClientState] = {}
    while play.server.step != "done":
        step = play.server.step
        play.step(gone=["n04"] if step == "mask" else [])
        states[step] = ClientState.from_bytes(play.stored["n00"])
        assert ClientState.from_bytes(states[step].to_bytes()) == states[step]
    first, shared, masked, signed, done = (states[step] for step in STEPS)
    assert first.masking not in shared.to_bytes() or shared.masking == first.masking
    assert first.channel not in shared.to_bytes()
    for secret in (shared.masking, shared.seed, *(peer.channel for peer in shared.peers)):
        assert len(secret) == 32
        assert secret not in masked.to_bytes()
    for before, now in zip(masked.held, signed.held, strict=True):
        kept, lost = (before.key, before.seed)[:: 1 if before.name == "n04" else -1]
        assert kept in signed.to_bytes()
        assert lost not in signed.to_bytes()
        assert (now.key == b"") != (now.seed == b"")
    assert done.held == done.peers == ()
    for secret in (first.masking, first.channel, shared.seed):
        assert repr(secret) not in repr(states)


@pytest.mark.parametrize("cut", [0, 1, 10, 100])
def test_bytes_that_are_no_state_or_identity_are_invalid(cut) -> None:
    play = Play(a_session(4), some(4)).until("mask")
    for kind, data in (
        (ClientState, play.stored["n00"]),
        (Identity, some(1)["n00"].to_bytes()),
        (Session, play.session.to_bytes()),
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
    session = a_session(3)

    def source(seed: int) -> primitives.ByteSource:
        return np.random.default_rng(seed).bytes

    def first_two(seed: int) -> list[Any]:
        server = Aggregation(session, AUTHORITY.trust, nodes)
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


def test_a_session_travels_and_its_id_is_of_all_of_it() -> None:
    session = a_session(9, 3, 2, degree=4)
    assert Session.from_message(session.to_message()) == session
    assert Session.from_bytes(session.to_bytes()) == session
    changes = {"run": b"x", "round": 9, "attempt": 9, "size": 9, "threshold": 2, "least": 9}
    others = [replace(session, **{name: value}) for name, value in changes.items()]
    others += [replace(session, degree=None), replace(session, degree=6)]
    assert len({one.id for one in (session, *others)}) == 1 + len(others)
    for name in changes:
        message = {**session.to_message(), name: changes[name]}
        with pytest.raises(Invalid, match="another session"):
            Session.from_message(message)
    with pytest.raises(Invalid):
        Session.from_message({**session.to_message(), "size": True})
    with pytest.raises(Invalid):
        Session.from_message({})


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"threshold": 0}, {"least": 0}, {"round": -1}, {"degree": 3}, {"degree": 2},
     {"run": "text"}, {"size": 2.0}],
)  # fmt: skip
def test_settings_that_make_no_session(wrong) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(a_session(9, 3, 2, degree=4), **wrong)


def test_messages_hold_what_a_flower_record_can() -> None:
    app = pytest.importorskip("flwr.app")
    play = Play(a_session(4, 3, 3), some(4))
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
    session = a_session(60, 5, degree=8)
    found = graph.neighbours(session, keys)
    assert found == graph.neighbours(session, dict(reversed(keys.items())))
    for name, circle in found.items():
        assert name in circle
        assert len(circle) == 9
        assert all(name in found[other] for other in circle)
    assert found != graph.neighbours(session, {**keys, "n00": b"k" * 64})
    assert found != graph.neighbours(replace(session, attempt=1), keys)
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
    session = a_session(12, 2, degree=2)
    counts = dict.fromkeys(list(some(12))[1:], 0)
    for i in range(2200):
        for name in graph.neighbours(replace(session, round=i), some_keys(12))["n00"] - {"n00"}:
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
    a_session(n, choice.threshold, degree=choice.degree)


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
    session = a_session(14, 2, degree=4)
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
