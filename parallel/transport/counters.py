"""Counters by which the ranks of one host tell each other how far they are, in memory that all of them map.

[Note: counters]
Each rank owns one set of counters and only ever raises them; the others read. A counter is eight aligned bytes with one
writer, in a cache line of its own. Whoever waits for a counter notices within `LIVENESS_INTERVAL_S` that its writer has
died or gave up, so nobody spins for ever.

Counters order the data written before them only on processors that keep the order of stores (x86-64).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..collective_error import CollectiveError, CollectiveTimeout, PeerLost
from .peers import Peers
from .shared_segments import Segments

HEADER_BYTES = 4096
FIRST_PLACE = 16  # of a counter, in units of eight bytes; then every eighth: a cache line for each
LIVENESS_INTERVAL_S = 0.05
_GIVEN_UP = 8
_SPINS = 200
_PAUSE_S = 0.0002
_DEFAULT_TIMEOUT_S = 1800.0


class Counters:
    """One set for each rank of a group, in the first `HEADER_BYTES` of each rank's segment.

    Args:
        segments: of all ranks, as `map_segments` made them.
        rank: this process's own.
        timeout_s: how long to wait for a rank that lives.
        yield_s: how long to yield the processor before sleeping, when ranks may outnumber the processors.
        what: opens the sentences of errors.
    """

    def __init__(
        self, segments: Segments, rank: int, timeout_s: float, *, yield_s: float = 0.0003, what: str = ""
    ) -> None:
        self._peers = Peers(segments.pids)
        self._rank = rank
        self._timeout_s = timeout_s
        self._yield_s = yield_s
        self._what = f"{what}: " if what else ""
        self._all = [memoryview(segment)[:HEADER_BYTES].cast("q") for segment in segments.maps]
        self._own = self._all[rank]

    def set(self, counter: int, number: int) -> None:
        """Tell the others."""
        self._own[counter] = number

    def all_have(self, counter: int, number: int) -> bool:
        """Whether every rank has come so far; returns at once."""
        return self._lagging(counter, number) is None

    def wait(self, counter: int, number: int) -> None:
        """Return when every rank has come so far.

        Raises:
            PeerLost: a rank died or gave up before it came so far.
            CollectiveTimeout: a rank that lives did not come in time.
        """
        for _ in range(_SPINS):
            if self._lagging(counter, number) is None:
                return
        began = looked = time.monotonic()
        pause = 0.0
        while (rank := self._lagging(counter, number)) is not None:
            time.sleep(pause)
            now = time.monotonic()
            pause = 0.0 if now - began < self._yield_s else _PAUSE_S
            if now - looked > LIVENESS_INTERVAL_S:
                looked = now
                self._check_alive(counter, number)
            if now - began > self._timeout_s:
                self._break(CollectiveTimeout, f"rank {rank} did not come within {self._timeout_s:g} s")

    def give_up(self) -> None:
        """Leave a mark: ranks that wait for this one raise."""
        self._own[_GIVEN_UP] = 1

    def _lagging(self, counter: int, number: int) -> int | None:
        """A rank whose counter has not come so far."""
        for rank, counters in enumerate(self._all):
            if counters[counter] < number:
                return rank
        return None

    def _check_alive(self, counter: int, number: int) -> None:
        dead = self._peers.first_dead()
        # Whoever ended after it had done its part is not missed; its counter was written before it ended.
        if dead is not None and self._all[dead[0]][counter] < number:
            self._break(PeerLost, f"rank {dead[0]} (process {dead[1]}) has died")
        for rank, counters in enumerate(self._all):
            if counters[_GIVEN_UP]:
                self._break(PeerLost, f"rank {rank} gave up: its error says why")

    def _break(self, kind: type[CollectiveError], reason: str) -> None:
        self.give_up()
        raise kind(f"{self._what}{reason}", rank=self._rank, world_size=len(self._all))


def timeout_of(group: dist.ProcessGroup) -> float:
    """The time-out in seconds that a gloo group was made with."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else _DEFAULT_TIMEOUT_S
