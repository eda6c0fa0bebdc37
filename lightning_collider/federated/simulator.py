"""Clients on a simulated clock: a deterministic queue of events behind a Grid's methods.

It runs the very client app that Flower would run, with Flower's messages and Contexts. A job's
computation happens when its message is pushed; its reply is delivered when the simulated client,
with its speed, would have finished. Time passes only from event to event.

    duration of a job = work in passes of one example / (speed of the client x jitter of the job)

Speed and jitter are log-normal. Training costs one pass an example, a correction 4/3 (the teacher's
forward is a third of a pass). A client may die in a job: then its Context is lost, the server gets
the error that Flower sends, and the client comes back later. Some clients join late. Each client
draws from a generator of its own, so that its fate does not depend on the others or the algorithm.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from lightning_collider.federated.client import PARTITION
from lightning_collider.federated.messages import REPORT
from lightning_collider.federated.settings import SimulationConfig
from lightning_collider.federated.tasks import mixed_seed

App = Callable[[Message, Context], Message]
FIRST_NODE = 1000  # so that a node's id is not mistaken for the number of its data


class SimulatedClient:
    """One client: its part of the data, its speed and its fate."""

    def __init__(self, number: int, config: SimulationConfig, seed: int):
        self.node = FIRST_NODE + number
        self.number, self.config = number, config
        self.rng = np.random.default_rng(mixed_seed(seed, number))
        scale, sigma = config.examples_per_second, config.speed_sigma
        self.speed = scale * float(np.exp(sigma * self.rng.standard_normal()))
        late, when = self.rng.random(2)
        self.joins_at = when * config.late_by if late < config.late_share else 0.0
        self.forget()

    def forget(self) -> None:
        """Lose everything that was kept between messages."""
        self.context = Context(0, self.node, {PARTITION: self.number}, RecordDict(), {})

    def answer(self, app: App, message: Message) -> tuple[Message, float, bool]:
        """The reply, the seconds until it is there, and whether the client dies instead."""
        jitter = float(np.exp(self.config.jitter_sigma * self.rng.standard_normal()))
        fate, moment = self.rng.random(2)
        try:
            reply = app(message, self.context)
        except Exception as error:  # as Flower's runtime does: reported, never raised
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        seconds = _work(reply) / (self.speed * jitter)
        if fate < self.config.dropout:
            reason = f"client {self.number} died"
            reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)
            return reply, self.config.latency + moment * seconds, True
        return reply, 2 * self.config.latency + seconds, False


class Simulator:
    """The grid and the clock of a simulated federation.

    Args:
        app: Flower's ClientApp, or any function of a message and a context.
        clients: number of clients.
        config: speeds, drop-outs, late joins.
        seed: of all that is drawn.
    """

    def __init__(self, app: App, clients: int, config: SimulationConfig, seed: int):
        self.app, self.config = app, config
        _identify()
        self._now = 0.0
        self._ids = itertools.count(1)
        self._events: list[tuple[float, int, str, Any]] = []  # time, order, kind, what
        self._arrived: dict[str, Message] = {}  # replies by the id of what they answer
        self._there: set[int] = set()
        self.clients = {c.node: c for c in (SimulatedClient(i, config, seed) for i in range(clients))}
        for client in self.clients.values():
            if client.joins_at:
                self._plan(client.joins_at, "join", client.node)
            else:
                self._there.add(client.node)

    # The clock

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Go on to the next event, but no further than so many seconds."""
        if self._events and self._events[0][0] <= self._now + seconds:
            self._next_event()
        else:
            self._now += seconds

    # The grid

    def get_node_ids(self) -> list[int]:
        """Clients that are there now."""
        return sorted(self._there)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages; returns their ids. One to a client that is away is an empty id."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies to these messages; where none is there, after going on to the next event."""
        asked = set(message_ids)
        if not asked & self._arrived.keys() and self._events:
            self._next_event()
        return [self._arrived.pop(i) for i in list(self._arrived) if i in asked]

    def _next_event(self) -> None:
        self._now, _, kind, what = heapq.heappop(self._events)
        if kind == "join":
            self._there.add(what)
        elif kind == "death":
            self._there.discard(what)
            self.clients[what].forget()
            self._plan(self._now + self.config.absence, "join", what)
        else:
            self._arrived[what.metadata.reply_to_message_id] = what

    def _push(self, message: Message) -> str:
        client = self.clients[message.metadata.dst_node_id]
        if client.node not in self._there:
            return ""
        message_id = str(next(self._ids))
        message.metadata.__dict__["_message_id"] = message_id  # as Flower's grids do
        reply, seconds, dies = client.answer(self.app, message)
        if seconds > message.metadata.ttl:  # what Flower answers when a reply is overdue
            seconds = message.metadata.ttl
            late = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "the message has expired")
            reply = Message(late, reply_to=message)
        if dies:
            self._plan(self._now + seconds, "death", client.node)
        self._plan(self._now + seconds, "reply", reply)
        return message_id

    def _plan(self, time: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (time, next(self._ids), kind, what))


def _identify() -> None:
    """Flower's messages need to know whose they are; its own runtimes say so, and here nobody."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.task_id = 0, 0
        TaskIdentity.node_id = SUPERLINK_NODE_ID


def _work(reply: Message) -> float:
    """Passes of one example that a reply reports; 0 for an error."""
    if reply.has_error() or REPORT not in reply.content:
        return 0.0
    return float(reply.content[REPORT].get("work", 0.0))
