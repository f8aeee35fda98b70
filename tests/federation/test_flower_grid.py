"""The grid that other tests rely on: does it do what Flower does, and go wrong as told?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_grid import (
    PATIENCE,
    Action,
    Corrupt,
    Crash,
    Delay,
    DropReply,
    DropRequest,
    Fault,
    Impersonate,
    InProcessGrid,
    Kill,
    Raise,
    Repeat,
    Step,
)
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp

client = ClientApp()


@client.query()
def count(message: Message, context: Context) -> Message:
    """How often the node was asked, as far as it remembers, and bytes that might be corrupted."""
    state = context.state.get("own")
    n = int(state["n"]) + 1 if isinstance(state, ConfigRecord) else 1
    context.state["own"] = ConfigRecord({"n": n})
    if message.content["ask"].get("fail"):
        raise ZeroDivisionError("asked to")
    return Message(
        RecordDict(
            {
                "own": ConfigRecord({"n": n, "node": context.node_config["partition-id"]}),
                "data": ConfigRecord({"bytes": bytes(16), "many": [bytes(4), bytes(4)]}),
                "array": ArrayRecord([np.zeros(8)]),
            }
        ),
        reply_to=message,
    )


def ask(grid: Grid, ids: Iterable[int], **what: bool) -> list[Message]:
    return [
        Message(RecordDict({"ask": ConfigRecord(dict(what))}), i, "query", group_id="1")
        for i in ids
    ]


def on(node: int, *actions: Action, first: int = 0, times: int = 1) -> Fault:
    """These actions for one node's messages, ``times`` of them from its ``first`` on."""

    def fault(step: Step) -> Iterable[Action]:
        return actions if step.node == node and first <= step.count < first + times else ()

    return fault


def counts(replies: Iterable[Message]) -> dict[int, int]:
    """What every node said, by its number."""
    return {
        int(r.content["own"]["node"]): int(r.content["own"]["n"])
        for r in replies
        if r.has_content()
    }


def errors(replies: Iterable[Message]) -> list[int]:
    return sorted(r.error.code for r in replies if r.has_error())


def exchange(grid: InProcessGrid, timeout: float = 30.0, **what: bool) -> list[Message]:
    return grid.send_and_receive(ask(grid, grid.ids, **what), timeout=timeout)


def test_messages_and_state_are_kept_apart() -> None:
    grid = InProcessGrid(client, 3, run_config={"a": 1})
    assert sorted(grid.get_node_ids()) == sorted(grid.ids)
    first = exchange(grid)
    assert counts(first) == {0: 1, 1: 1, 2: 1}
    assert counts(exchange(grid)) == {0: 2, 1: 2, 2: 2}
    assert {r.metadata.src_node_id for r in first} == set(grid.ids)
    assert grid.context(1).state["own"]["n"] == 2
    assert grid.context(1).run_config == {"a": 1}
    first[0].content["own"]["n"] = 99
    assert counts(exchange(grid)) == {0: 3, 1: 3, 2: 3}


def test_a_server_app_runs_on_it() -> None:
    app, seen = ServerApp(), []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        seen.append((context.run_config, counts(grid.send_and_receive(ask(grid, [min_id])))))

    grid = InProcessGrid(client, 2, run_config={"rounds": 3})
    min_id = grid.ids[0]
    grid.serve(app)
    assert seen == [({"rounds": 3}, {0: 1})]


def test_a_message_is_delivered_and_returned_once() -> None:
    grid = InProcessGrid(client, 1)
    ids = grid.push_messages(ask(grid, grid.ids))
    assert counts(grid.pull_messages(ids)) == {0: 1}
    assert errors(grid.pull_messages(ids)) == [ErrorCode.MESSAGE_UNAVAILABLE]
    assert grid.push_messages(ask(grid, [12345])) == [""]


@pytest.mark.parametrize(("action", "after"), [(DropRequest(), 1), (DropReply(), 2)])
def test_what_is_dropped(action: Action, after: int) -> None:
    grid = InProcessGrid(client, 2, fault=on(1, action))
    began, real = grid.clock.time(), time.perf_counter()
    assert counts(exchange(grid, 30)) == {0: 1}
    assert grid.clock.time() - began >= 30
    assert time.perf_counter() - real < 5
    assert counts(exchange(grid)) == {0: 2, 1: after}


def test_a_late_reply() -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Delay(40)))
    ids = grid.push_messages(ask(grid, grid.ids))
    assert counts(grid.pull_messages(ids)) == {0: 1}
    assert grid.pull_messages(ids[1:]) == []
    assert counts(exchange(grid, 10)) == {0: 2, 1: 2}  # the stale one comes only if asked for
    grid.clock.sleep(40)
    assert counts(grid.pull_messages(ids[1:])) == {1: 1}


def test_a_late_reply_that_nobody_asked_for() -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Delay(40, unasked=True)))
    assert counts(exchange(grid)) == {0: 1}
    grid.clock.sleep(20)
    replies = exchange(grid)
    assert sorted(int(r.content["own"]["n"]) for r in replies) == [1, 2, 2]


def test_a_repeated_reply() -> None:
    grid = InProcessGrid(client, 2, fault=on(0, Repeat(2)))
    assert len(exchange(grid)) == 4
    assert len(exchange(grid)) == 2


def test_replies_come_in_any_order() -> None:
    grid = InProcessGrid(client, 6)
    orders = {tuple(counts(exchange(grid))) for _ in range(5)}
    assert len(orders) > 1


@pytest.mark.parametrize("seed", range(8))
def test_one_bit_is_flipped(seed: int) -> None:
    grid = InProcessGrid(client, 1, fault=on(0, Corrupt()), seed=seed)
    (reply,) = exchange(grid)
    (honest,) = exchange(grid)

    def parts(message: Message) -> bytes:
        data = message.content["data"]
        return data["bytes"] + b"".join(data["many"]) + message.content["array"]["0"].data

    different = int.from_bytes(parts(reply)) ^ int.from_bytes(parts(honest))
    assert different.bit_count() == 1


def test_what_a_function_changes() -> None:
    def change(content: RecordDict, _: object) -> None:
        content["own"]["n"] = -7

    grid = InProcessGrid(client, 2, fault=on(1, Corrupt(change=change)))
    assert counts(exchange(grid)) == {0: 1, 1: -7}

    def fail(content: RecordDict, _: object) -> None:
        content["ask"]["fail"] = True

    grid = InProcessGrid(client, 2, fault=on(1, Corrupt(request=True, change=fail)))
    assert errors(exchange(grid)) == [ErrorCode.CLIENT_APP_RAISED_EXCEPTION]


def test_a_reply_in_anothers_name() -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Impersonate(0)))
    assert {r.metadata.src_node_id for r in exchange(grid)} == {grid.ids[0]}


def test_errors_in_the_client() -> None:
    grid = InProcessGrid(client, 2)
    replies = exchange(grid, fail=True)
    assert errors(replies) == [ErrorCode.CLIENT_APP_RAISED_EXCEPTION] * 2
    assert replies[0].error.reason == "<class 'ZeroDivisionError'>:<'asked to'>"
    assert counts(exchange(grid)) == {0: 2, 1: 2}  # what changed before the exception is kept


@pytest.mark.parametrize(("after", "then"), [(False, 1), (True, 2)])
def test_an_injected_error(after: bool, then: int) -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Raise(after=after)))
    assert errors(exchange(grid)) == [ErrorCode.CLIENT_APP_RAISED_EXCEPTION]
    assert counts(exchange(grid)) == {0: 2, 1: then}


def test_a_crash_of_the_client() -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Crash()))
    assert errors(exchange(grid, 30)) == []
    assert counts(exchange(grid)) == {0: 2, 1: 1}
    grid = InProcessGrid(client, 2, fault=on(1, Crash()))
    replies = exchange(grid, 100)
    assert errors(replies) == [ErrorCode.CLIENT_APP_CRASHED]
    assert {r.metadata.src_node_id for r in replies} == set(grid.ids)


def test_a_reply_of_which_the_node_knows_nothing() -> None:
    grid = InProcessGrid(client, 2, fault=on(1, Crash(replied=True)))
    assert counts(exchange(grid)) == {0: 1, 1: 1}
    assert counts(exchange(grid)) == {0: 2, 1: 1}


def test_a_node_that_dies() -> None:
    grid = InProcessGrid(client, 3, fault=on(1, Kill()))
    assert counts(exchange(grid, 30)) == {0: 1, 2: 1}
    assert grid.ids[1] in grid.get_node_ids()  # nobody knows yet
    replies = exchange(grid, 60)
    assert errors(replies) == [ErrorCode.NODE_UNAVAILABLE]
    (gone,) = (r for r in replies if r.has_error())
    assert gone.metadata.src_node_id == SUPERLINK_NODE_ID
    assert grid.ids[1] not in grid.get_node_ids()


def test_a_node_that_says_goodbye() -> None:
    grid = InProcessGrid(client, 2)
    grid.stop(0)
    assert grid.get_node_ids() == [grid.ids[1]]
    assert errors(exchange(grid)) == [ErrorCode.NODE_UNAVAILABLE]


@pytest.mark.parametrize(
    ("kill", "then"),
    [
        (Kill(back=5), 2),
        (Kill(back=5, keep_state=False), 1),
        (Kill(after=True, back=5), 3),
        (Kill(after=True, back=5, keep_state=False), 1),
    ],
)
def test_a_node_that_comes_back(kill: Kill, then: int) -> None:
    grid = InProcessGrid(client, 2, fault=on(1, kill, first=1))
    exchange(grid)
    assert counts(exchange(grid, 30)) == {0: 2}
    assert counts(exchange(grid)) == {0: 3, 1: then}


def test_a_node_that_comes_back_gets_what_waits_for_it() -> None:
    grid = InProcessGrid(client, 2)
    grid.kill(1)
    ids = grid.push_messages(ask(grid, grid.ids))
    grid.clock.sleep(1)
    assert counts(grid.pull_messages(ids)) == {0: 1}
    grid.restart(1)
    assert counts(grid.pull_messages(ids[1:])) == {1: 1}


def test_messages_expire() -> None:
    grid = InProcessGrid(client, 1, fault=on(0, DropReply()))
    began = grid.clock.time()
    replies = grid.send_and_receive(
        [Message(RecordDict({"ask": ConfigRecord({})}), grid.ids[0], "query", ttl=100.0)]
    )
    assert errors(replies) == [ErrorCode.MESSAGE_UNAVAILABLE]
    assert 100 <= grid.clock.time() - began < 100 + PATIENCE


def test_the_same_seed_does_the_same() -> None:
    def play(seed: int) -> list[object]:
        def fault(step: Step) -> Action | None:
            chosen: list[Callable[[], Action | None]] = [
                lambda: None,
                DropRequest,
                DropReply,
                lambda: Delay(grid.random.uniform(0, 60)),
                Corrupt,
                lambda: Kill(back=grid.random.uniform(0, 60)),
                Crash,
                Raise,
            ]
            return grid.random.choice(chosen)()

        grid = InProcessGrid(client, 5, seed=seed, fault=fault, latency=0.1)
        said = [[r.metadata.src_node_id for r in exchange(grid, 30)] for _ in range(10)]
        return [grid.trace, grid.ids, said]

    assert play(3) == play(3)
    assert play(3) != play(4)
