"""Counters by which the ranks of one host tell each other how far they are.

[Note: parameters in shared memory]
On one CPU host the whole parameters of a unit lie in memory that all its ranks map: each rank's rows are its own part
of it, and "gathering" is no more than knowing that all have written theirs. Two fences keep readers and writers apart:

    ``written`` = k: this rank's rows are what is to be seen from its k-th forward on;
    ``read``    = k: this rank has ended reading for the k-th time, and others may write.

Reading ends with a backward, at the end of a forward without gradients, or at the latest before an optimizer's step.
Each counter is eight aligned bytes with one writer, in its own cache line.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
import torch.distributed as dist

from ..transport.base import CollectiveFailed
from ..transport.peers import Peers
from ..transport.shared_segments import map_segments

_HEADER_BYTES = 4096
_SPINS = 200
_LIVENESS_INTERVAL_S = 0.05
_DEFAULT_TIMEOUT_S = 1800.0


class Counter(IntEnum):
    """Places in the header, in units of eight bytes."""

    WRITTEN = 8
    READ = 16
    FILLED = 24
    SUMMED = 32
    BROKEN = 40


class SharedCounters:
    """One set for each rank of a group; all ranks of the group make it together.

    Raises:
        OSError: a rank could not map the others' memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        segments = map_segments(_HEADER_BYTES, group)
        if segments is None:
            raise OSError("the ranks cannot map each other's memory")
        self._rank = dist.get_rank(group)
        self._peers = Peers(segments.pids)
        self._all = [memoryview(segment).cast("q") for segment in segments.maps]
        self._timeout_s = _timeout_s(group)

    def set(self, counter: Counter, number: int) -> None:
        """Tell the others."""
        self._all[self._rank][counter] = number

    def all_have(self, counter: Counter, number: int) -> bool:
        """Whether every rank has come so far."""
        return self._lagging(counter, number) is None

    def wait(self, counter: Counter, number: int) -> None:
        """Return when every rank has come so far.

        Raises:
            CollectiveFailed: a rank has died, gave up, or did not come in time.
        """
        for _ in range(_SPINS):
            if self._lagging(counter, number) is None:
                return
        began = looked = time.monotonic()
        pause = 0.0
        while (rank := self._lagging(counter, number)) is not None:
            time.sleep(pause)
            now = time.monotonic()
            pause = 0.0 if now - began < 0.002 else 0.0002
            if now - looked > _LIVENESS_INTERVAL_S:
                looked = now
                self._check_alive(counter, number)
            if now - began > self._timeout_s:
                self._break(f"rank {rank} did not come within {self._timeout_s:g} s")

    def _lagging(self, counter: Counter, number: int) -> int | None:
        for rank, counters in enumerate(self._all):
            if counters[counter] < number:
                return rank
        return None

    def _check_alive(self, counter: Counter, number: int) -> None:
        dead = self._peers.first_dead()
        if dead is not None and self._all[dead[0]][counter] < number:
            self._break(f"rank {dead[0]} (process {dead[1]}) has died")
        for rank, counters in enumerate(self._all):
            if counters[Counter.BROKEN]:
                self._break(f"rank {rank} gave up")

    def _break(self, reason: str) -> None:
        self.set(Counter.BROKEN, 1)
        raise CollectiveFailed(f"FSDP in shared memory: {reason}")


def _timeout_s(group: dist.ProcessGroup) -> float:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else _DEFAULT_TIMEOUT_S
