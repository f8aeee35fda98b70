"""A Flower grid without Flower's processes: nodes are called in this process, and things go wrong.

:class:`InProcessGrid` behaves towards a ServerApp as the SuperLink does (flwr 1.41): which replies
a pull returns, what comes back in the name of a node that is gone, that a message is delivered at
most once. Requests, replies and every node's ``Context`` pass through Flower's serialization, so
that nothing is shared by accident. Time is a :class:`Clock` that moves only when somebody waits.

What goes wrong is the answer of a function ``fault(step)``, asked for every message that reaches a
node: None, one of the actions below, or several of them. Some are harsher than Flower, which
returns a reply at most once and only to those who ask for it: code that survives them needs no
such promise. Everything random comes from ``seed``.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import (
    DEFAULT_TTL,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    Metadata,
    RecordDict,
)
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

POLL = 3.0  # seconds between two questions of Flower's own send_and_receive
PULL = 0.001  # seconds that a pull takes, so that nobody waits forever without sleeping
PATIENCE = 60.0  # seconds until the SuperLink knows that a node is gone, or a ClientApp crashed


# --- What can go wrong -------------------------------------------------------------------------


@dataclass(frozen=True)
class DropRequest:
    """The node never gets the message."""


@dataclass(frozen=True)
class DropReply:
    """The node handles the message and keeps its state; its reply is lost."""


@dataclass(frozen=True)
class Delay:
    """The reply arrives this much later, in a pull that asks for it, or (``unasked``) in any."""

    seconds: float
    unasked: bool = False


@dataclass(frozen=True)
class Repeat:
    """The reply comes again, ``after`` seconds later, in whatever pull is next."""

    times: int = 1
    after: float = 0.0


@dataclass(frozen=True)
class Corrupt:
    """One bit flips among the reply's (or the request's) bytes, or ``change`` alters the records.

    ``change`` gets the records and a random generator and changes them where they are.
    """

    request: bool = False
    change: Callable[[RecordDict, random.Random], None] | None = None


@dataclass(frozen=True)
class Impersonate:
    """The reply claims to be another node's (by number): Flower lets a registered node do that."""

    node: int


@dataclass(frozen=True)
class Raise:
    """The ClientApp raises, before it did anything or ``after`` it changed its state."""

    error: Exception = field(default_factory=lambda: RuntimeError("injected"))
    after: bool = False


@dataclass(frozen=True)
class Crash:
    """The ClientApp's process dies, and with it what it did to its state; the node lives on.

    Flower says so in the node's name after a minute. With ``replied`` it dies between sending its
    reply and keeping its state: the server has an answer of which the node knows nothing.
    """

    replied: bool = False


@dataclass(frozen=True)
class Kill:
    """The node dies, before it handles the message or ``after`` (its reply is lost then).

    It comes back ``back`` seconds later, with its state or (as Flower's SuperNode) without; None:
    never, or when :meth:`InProcessGrid.restart` is called.
    """

    after: bool = False
    back: float | None = None
    keep_state: bool = True


Action = DropRequest | DropReply | Delay | Repeat | Corrupt | Impersonate | Raise | Crash | Kill


@dataclass(frozen=True)
class Step:
    """A message at the moment it reaches a node: what a fault is decided on."""

    number: int  # of the message among all that reached a node
    node: int  # which node, by number
    count: int  # how many messages this node got before
    message_type: str
    group_id: str
    content: RecordDict
    time: float


Fault = Callable[[Step], "Action | Iterable[Action] | None"]


class Clock:
    """Time that passes when somebody waits. Stands in for the module ``time``."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now

    monotonic = perf_counter = time

    def sleep(self, seconds: float) -> None:
        """Let time pass, with all that was to happen in it."""
        end = self._now + seconds
        while self._events and self._events[0][0] <= end:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = end

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Have something happen at a time (now, if that is past)."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self._now), self._count, event))

    def next(self) -> float | None:
        """When the next thing is to happen."""
        return self._events[0][0] if self._events else None


@dataclass
class Node:
    """A node: its ClientApp, and what a restart keeps of it."""

    number: int
    node_id: int
    app: ClientApp
    context: bytes
    fresh: bytes
    alive: bool = True
    gone_since: float | None = None
    count: int = 0


@dataclass
class _Asked:
    """A request on its way: who is to answer, until when, and the answer once it is there."""

    node: Node
    request: bytes
    metadata: Metadata
    until: float
    number: int
    delivered: bool = False
    reply: bytes | None = None


class InProcessGrid(Grid):
    """A grid of ``nodes`` nodes that run ``app`` in this process.

    Parameters
    ----------
    app
        The ClientApp of every node, or one for each.
    nodes
        How many nodes, if ``node_configs`` does not say.
    node_configs
        A ``node_config`` for each; by default ``partition-id`` and ``num-partitions``.
    run_config
        Every context's ``run_config``.
    fault
        What goes wrong; see the module.
    latency
        Seconds until a request arrives, and until its reply does.
    shuffle
        Whether a pull returns replies in a random order (Flower promises none).
    """

    def __init__(
        self,
        app: ClientApp | Sequence[ClientApp],
        nodes: int = 5,
        *,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        run_config: Mapping[str, Any] | None = None,
        fault: Fault | None = None,
        seed: int = 0,
        latency: float = 0.0,
        shuffle: bool = True,
        clock: Clock | None = None,
        run_id: int = 1,
    ) -> None:
        configs = (
            [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
            if node_configs is None
            else [dict(config) for config in node_configs]
        )
        apps = [app] * len(configs) if isinstance(app, ClientApp) else list(app)
        self.random = random.Random(seed)
        self.clock = clock or Clock()
        self.fault = fault
        self.latency = latency
        self.shuffle = shuffle
        self.run_config = dict(run_config or {})
        self.trace: list[tuple[float, str, int, str]] = []
        self._run = Run.create_empty(run_id)
        self._asked: dict[str, _Asked] = {}
        self._unasked: list[bytes] = []
        self._steps = 0
        self._pushed = 0
        self.nodes: list[Node] = []
        for number, (config, of_node) in enumerate(zip(configs, apps, strict=True)):
            node_id = self.random.getrandbits(63) + 2
            context = Context(run_id, node_id, config, RecordDict(), dict(self.run_config))
            fresh = context_to_proto(context).SerializeToString(deterministic=True)
            self.nodes.append(Node(number, node_id, of_node, fresh, fresh))
        self._by_id = {node.node_id: node for node in self.nodes}
        self._be(SUPERLINK_NODE_ID)

    # --- For tests -----------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """The nodes' ids, by number."""
        return [node.node_id for node in self.nodes]

    def serve(self, app: ServerApp) -> Context:
        """Run a ServerApp on this grid to its end; its context."""
        self._be(SUPERLINK_NODE_ID)
        context = Context(
            self._run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(self.run_config)
        )
        app(self, context)
        return context

    def context(self, node: int) -> Context:
        """A copy of what the node keeps between messages."""
        return context_from_proto(ContextProto.FromString(self.nodes[node].context))

    def kill(self, node: int) -> None:
        """The node is gone from now on; the SuperLink notices a minute later."""
        it = self.nodes[node]
        if it.alive:
            it.alive, it.gone_since = False, self.clock.time()
            self._note("killed", it)

    def stop(self, node: int) -> None:
        """The node says goodbye and is gone: the SuperLink knows at once."""
        self.kill(node)
        self.nodes[node].gone_since = -math.inf

    def restart(self, node: int, *, keep_state: bool = True) -> None:
        """The node is back, with its state or without; it gets what waits for it."""
        it = self.nodes[node]
        it.alive, it.gone_since = True, None
        if not keep_state:
            it.context = it.fresh
        self._note("restarted", it)
        for asked in self._asked.values():
            if asked.node is it and not asked.delivered:
                self.clock.at(self.clock.time(), lambda asked=asked: self._deliver(asked))

    # --- Flower's interface --------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return copy.copy(self._run)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        self.clock.sleep(0)
        known = [node.node_id for node in self.nodes if not self._known_gone(node)]
        if self.shuffle:
            self.random.shuffle(known)
        return known

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            metadata = message.metadata
            node = self._by_id.get(metadata.dst_node_id)
            if node is None:
                ids.append("")  # so does the SuperLink
                continue
            if metadata.run_id != self._run.run_id or metadata.src_node_id != SUPERLINK_NODE_ID:
                raise ValueError("The message was not made for this grid.")
            now = self.clock.time()
            ttl = metadata.ttl or DEFAULT_TTL
            request = to_bytes(message)
            name = metadata.message_id
            asked = _Asked(node, request, metadata, now + ttl, self._pushed)
            self._asked[name] = asked
            self._pushed += 1
            self._note("pushed", node, metadata.message_type)
            self.clock.at(now + self.latency, lambda asked=asked: self._deliver(asked))
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.clock.sleep(PULL)
        # Names are hashes of, among others, real time: what is drawn must not depend on them.
        known = {name: asked.number for name, asked in self._asked.items()}
        names = sorted(set(message_ids), key=lambda name: known.get(name, self._pushed))
        now = self.clock.time()
        replies = [from_bytes(data) for data in self._unasked]
        self._unasked = []
        for name in names:
            asked = self._asked.get(name)
            if asked is None or asked.until < now:
                replies.append(self._superlink(name, None, ErrorCode.MESSAGE_UNAVAILABLE))
            elif self._known_gone(asked.node):  # even if it replied before
                replies.append(self._superlink(name, asked, ErrorCode.NODE_UNAVAILABLE))
            elif asked.reply is not None:
                replies.append(from_bytes(asked.reply))
            else:
                continue
            self._asked.pop(name, None)
        if self.shuffle:
            self.random.shuffle(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        names = set(self.push_messages(messages))
        end = self.clock.time() + (timeout or 0.0)
        replies: list[Message] = []
        while timeout is None or self.clock.time() < end:
            found = self.pull_messages(names)
            replies.extend(found)
            names.difference_update(reply.metadata.reply_to_message_id for reply in found)
            if not names:
                break
            self.clock.sleep(POLL)
        return replies

    # --- What happens --------------------------------------------------------------------------

    def _deliver(self, asked: _Asked) -> None:
        node, now = asked.node, self.clock.time()
        if asked.delivered or not node.alive or asked.until < now:
            return
        asked.delivered = True
        request = from_bytes(asked.request)
        metadata = request.metadata
        step = Step(
            self._steps,
            node.number,
            node.count,
            metadata.message_type,
            metadata.group_id,
            from_bytes(asked.request).content,
            now,
        )
        self._steps += 1
        node.count += 1
        actions = self._faults(step)
        for action in actions:
            self._note(type(action).__name__, node, metadata.message_type)
        kinds = {type(action): action for action in actions}
        if DropRequest in kinds:
            return
        kill = kinds.get(Kill)
        if isinstance(kill, Kill) and not kill.after:
            self._end(node, kill)
            return
        for action in actions:
            if isinstance(action, Corrupt) and action.request:
                self._corrupt(request.content, action)
        crash = kinds.get(Crash)
        if isinstance(crash, Crash) and not crash.replied:
            error = Message(
                Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding."),
                reply_to=request,
            )
            self._answer(asked, error, PATIENCE)
            return
        reply = self._handle(node, request, kinds.get(Raise), keep=crash is None)
        if isinstance(kill, Kill):
            self._end(node, kill)
            return
        self._reply(asked, reply, actions)

    def _handle(self, node: Node, request: Message, injected: object, keep: bool) -> Message:
        """What the node's process does with a message, as Flower runs it."""
        context = context_from_proto(ContextProto.FromString(node.context))
        try:
            if isinstance(injected, Raise) and not injected.after:
                raise injected.error
            with self._as(node.node_id):
                reply = node.app(request, context)
            if isinstance(injected, Raise):
                raise injected.error
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=request)
        if keep:  # also after an exception, as Flower does
            node.context = context_to_proto(context).SerializeToString(deterministic=True)
        return reply

    def _reply(self, asked: _Asked, reply: Message, actions: Sequence[Action]) -> None:
        later, unasked, lost = 0.0, False, False
        for action in actions:
            if isinstance(action, Delay):
                later, unasked = later + action.seconds, unasked or action.unasked
            elif isinstance(action, Corrupt) and not action.request and reply.has_content():
                self._corrupt(reply.content, action)
            elif isinstance(action, Impersonate):
                reply.metadata.__dict__["_src_node_id"] = self.nodes[action.node].node_id
            elif isinstance(action, DropReply):
                lost = True
        data = to_bytes(reply)
        for action in actions:
            if isinstance(action, Repeat):
                for time in range(action.times):
                    after = later + self.latency + action.after * (time + 1)
                    self.clock.at(self.clock.time() + after, lambda: self._unasked.append(data))
        if lost:
            return
        if unasked:
            self.clock.at(
                self.clock.time() + later + self.latency, lambda: self._unasked.append(data)
            )
            return
        self._answer(asked, reply, later)

    def _answer(self, asked: _Asked, reply: Message, later: float) -> None:
        data = to_bytes(reply)

        def arrive() -> None:
            asked.reply = data
            self._note("replied", asked.node, asked.metadata.message_type)

        self.clock.at(self.clock.time() + later + self.latency, arrive)

    def _end(self, node: Node, kill: Kill) -> None:
        self.kill(node.number)
        if kill.back is not None:
            self.clock.at(
                self.clock.time() + kill.back,
                lambda: self.restart(node.number, keep_state=kill.keep_state),
            )

    def _faults(self, step: Step) -> list[Action]:
        found = self.fault(step) if self.fault is not None else None
        if found is None:
            return []
        return list(found) if isinstance(found, Iterable) else [found]

    def _corrupt(self, content: RecordDict, action: Corrupt) -> None:
        if action.change is not None:
            action.change(content, self.random)
        else:
            flip(content, self.random)

    def _known_gone(self, node: Node) -> bool:
        return node.gone_since is not None and self.clock.time() > node.gone_since + PATIENCE

    def _superlink(self, name: str, asked: _Asked | None, code: int) -> Message:
        """What the SuperLink says in place of a reply; it does not name the node."""
        metadata = Metadata(
            run_id=self._run.run_id,
            message_id="",
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=SUPERLINK_NODE_ID,
            reply_to_message_id=name,
            group_id=asked.metadata.group_id if asked else "",
            created_at=self.clock.time(),
            ttl=0.0,
            message_type=asked.metadata.message_type if asked else SYSTEM_MESSAGE_TYPE,
        )
        return make_message(metadata, error=Error(code, "said by the SuperLink"))

    def _note(self, what: str, node: Node, message_type: str = "") -> None:
        self.trace.append((self.clock.time(), what, node.number, message_type))

    def _be(self, node_id: int) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id = self._run.run_id, 1
        TaskIdentity.node_id = node_id

    @contextmanager
    def _as(self, node_id: int) -> Iterator[None]:
        self._be(node_id)
        try:
            yield
        finally:
            self._be(SUPERLINK_NODE_ID)


def to_bytes(message: Message) -> bytes:
    message.metadata.__dict__["_message_id"] = message.object_id
    return message_to_proto(message).SerializeToString(deterministic=True)


def from_bytes(data: bytes) -> Message:
    return message_from_proto(MessageProto.FromString(data))


def flip(content: RecordDict, rng: random.Random) -> None:
    """Flip one bit somewhere among the records' bytes and arrays."""
    places: list[tuple[Any, Any, bytes]] = []
    for record in content.values():
        if isinstance(record, ConfigRecord):
            for key, value in record.items():
                if isinstance(value, bytes) and value:
                    places.append((record, key, value))
                elif isinstance(value, list):
                    places.extend(
                        (value, i, v) for i, v in enumerate(value) if isinstance(v, bytes) and v
                    )
        elif isinstance(record, ArrayRecord):
            places.extend((array, None, array.data) for array in record.values() if array.data)
    if not places:
        raise ValueError("The records hold no bytes to corrupt.")
    holder, key, value = rng.choice(places)
    changed = bytearray(value)
    bit = rng.randrange(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    if key is None:
        holder.data = bytes(changed)
    else:
        holder[key] = bytes(changed)
