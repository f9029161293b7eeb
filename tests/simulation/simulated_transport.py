"""How bytes travel between simulated movers, with the semantics of the real transports."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Clock:
    """Simulated time: what is to happen, in order; of equal times what was planned first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._num_planned += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_planned, event))

    def run_next(self) -> bool:
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(frozen=True, slots=True)
class Message:
    """A header and what it announces; `has_failed`: the sender could not bring the bytes."""

    transaction: int
    layer: int
    expert: int
    payload: Any
    has_failed: bool = False


Receiver = Callable[[Message], None]


class GlooGroup:
    """First in, first out per pair of ranks, and no tags: a message goes to the receive that was posted first, also to
    one that its owner has given up. A receive cannot be taken back."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self._waiting: defaultdict[tuple[int, int], deque[Receiver]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], deque[tuple[Message, Callable[[], None]]]] = defaultdict(deque)
        self._last_arrival: defaultdict[tuple[int, int], float] = defaultdict(float)

    def send(self, source: int, target: int, message: Message, on_sent: Callable[[], None]) -> None:
        pair = (source, target)
        arrival = max(self._last_arrival[pair], self.clock.now + self.rng.random() * 0.05)
        self._last_arrival[pair] = arrival

        def arrive() -> None:
            self._arrived[pair].append((message, on_sent))
            self._match(pair)

        self.clock.after(arrival - self.clock.now, arrive)

    def receive(self, source: int, target: int, message: Message, receiver: Receiver) -> None:
        self._waiting[source, target].append(receiver)
        self._match((source, target))

    def _match(self, pair: tuple[int, int]) -> None:
        while self._waiting[pair] and self._arrived[pair]:
            message, on_sent = self._arrived[pair].popleft()
            self._waiting[pair].popleft()(message)
            on_sent()


class SharedMemory:
    """Bytes are published under their header and pulled by it: no receive is ever pending."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self._published: dict[tuple[int, int, int, int, int], Message] = {}
        self._waiting: dict[tuple[int, int, int, int, int], Receiver] = {}

    def send(self, source: int, target: int, message: Message, on_sent: Callable[[], None]) -> None:
        key = (source, target, message.transaction, message.layer, message.expert)
        self._published[key] = message
        self._match(key)
        on_sent()

    def receive(self, source: int, target: int, message: Message, receiver: Receiver) -> None:
        key = (source, target, message.transaction, message.layer, message.expert)
        self._waiting[key] = receiver
        self._match(key)

    def _match(self, key: tuple[int, int, int, int, int]) -> None:
        if key in self._published and key in self._waiting:
            self._waiting.pop(key)(self._published[key])
