"""Time that only the simulation moves: one queue of things to come, and each host's own idea of what time it is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple


class Due:
    """Something that will happen, until it is cancelled."""

    __slots__ = ("arguments", "at", "call")

    def __init__(self, at: float, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.at = at
        self.call: Callable[..., object] | None = call
        self.arguments = arguments

    def cancel(self) -> None:
        """Let it not happen."""
        self.call = None
        self.arguments = ()


class Scheduler:
    """What will happen, in the order of time; things of the same instant in the order in which they were arranged."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds of true time, which no host knows
        self.steps = 0
        self._queue: list[tuple[float, int, Due]] = []
        self._order = itertools.count()

    def at(self, at: float, call: Callable[..., object], *arguments: Any) -> Due:
        """Arrange ``call(*arguments)`` for a time; at once, but after what is due already, where it has passed."""
        due = Due(max(at, self.now), call, arguments)
        heapq.heappush(self._queue, (due.at, next(self._order), due))
        return due

    def after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> Due:
        """Arrange ``call(*arguments)`` for a time from now."""
        return self.at(self.now + delay_s, call, *arguments)

    def step(self, until: float) -> bool:
        """Let the next thing happen; False where nothing more is due up to ``until``, which is the time then."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            at, _order, due = heapq.heappop(queue)
            call = due.call
            if call is None:
                continue
            self.now = at
            self.steps += 1
            call(*due.arguments)
            return True
        self.now = max(self.now, until)
        return False


class HostClock(NamedTuple):
    """CLOCK_BOOTTIME of one host: it started when the host did, and runs a little too fast or too slow."""

    offset: float = 0.0  # what it shows at the true time 0
    rate: float = 1.0  # its seconds for one true second

    def shows(self, true: float) -> float:
        """What the host's clock shows at a true time."""
        return self.offset + true * self.rate

    def true(self, shown: float) -> float:
        """The true time at which the host's clock shows this."""
        return (shown - self.offset) / self.rate
