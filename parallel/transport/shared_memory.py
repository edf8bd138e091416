"""Buckets summed through memory that all ranks of one host share.

[Note: a reduction in shared memory]
Every rank's bucket lies in its own segment, and every rank maps all segments. A bucket is cut into one slice for each
rank. When all ranks have filled a bucket, each sums its slice over all segments, in pieces that stay in the processor's
second-level cache, and writes each sum to all of them. So every gradient is read and written once for each rank, no
byte passes through a socket, and all ranks hold the same bits.

Each rank owns two counters: ``filled`` (buckets that hold its gradients) and ``summed`` (buckets whose slice it has
written). A counter is eight aligned bytes with one writer. Work is done by the thread that trains, when it starts a
bucket and when it waits: another thread would compete with it for the processor and the interpreter.

Counters order the data written before them only on processors that keep the order of stores (x86-64).
"""

from __future__ import annotations

import platform
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .base import CollectiveFailed, Pending, TorchTransport
from .byte_gather import all_gather_bytes
from .peers import Peers
from .shared_segments import Segments, host_identity, map_segments

PIECE_BYTES = 256 * 1024
_ALIGNMENT = 64  # a cache line
_HEADER_BYTES = 4096
_FILLED, _SUMMED, _BROKEN = 8, 16, 24  # places in the header, in units of eight bytes, a cache line apart
_SPINS = 200
_YIELD_S = 0.0003  # yield the processor for so long before sleeping: ranks may outnumber processors
_PAUSE_S = 0.0002
_LIVENESS_INTERVAL_S = 0.05
_DEFAULT_TIMEOUT_S = 1800.0


def can_share_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group are processes of one host that may map each other's memory."""
    able = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    identities = all_gather_bytes(host_identity() if able else b"", torch.device("cpu"), group)
    return able and len(set(identities)) == 1


class SharedMemoryTransport:
    """Sums buckets that it allocated itself through shared memory, others through the process group."""

    name = "shared_memory"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._fallback = TorchTransport(group)
        self._arena: _Arena | None = None

    def allocate(self, specs: Sequence[tuple[int, torch.dtype, torch.device]]) -> list[Tensor]:
        """Buffers in this rank's segment; all ranks call this together, with the same ``specs``."""
        sizes = [_aligned(numel * dtype.itemsize) for numel, dtype, _ in specs]
        segments = map_segments(_HEADER_BYTES + sum(sizes), self._group)
        if segments is None:
            self.name = "torch"
            return self._fallback.allocate(specs)
        self._arena = _Arena(segments, specs, dist.get_rank(self._group), _timeout_s(self._group))
        return self._arena.buffers

    def all_reduce(self, flat: Tensor) -> Pending:
        """Begin: tell the others that the bucket is filled, and sum what is already filled everywhere."""
        if self._arena is None:
            return self._fallback.all_reduce(flat)
        return self._arena.start(flat)

    def give_up(self) -> None:
        """Ranks that wait for this one raise at once."""
        if self._arena is not None:
            self._arena.give_up()

    def close(self) -> None:
        """Unmap as soon as no gradient lies there any more."""
        self._arena = None


class _Arena:
    """One set of buckets in one set of segments."""

    def __init__(
        self, segments: Segments, specs: Sequence[tuple[int, torch.dtype, torch.device]], rank: int, timeout_s: float
    ) -> None:
        self._peers = Peers(segments.pids)
        self._rank = rank
        self._timeout_s = timeout_s
        self._counters = [memoryview(segment)[:_HEADER_BYTES].cast("q") for segment in segments.maps]
        self._queue: deque[tuple[int, int]] = deque()  # (number, bucket) that are not summed yet, oldest first
        self._started = 0
        everywhere = [_buffers(segment, specs) for segment in segments.maps]
        self.buffers = everywhere[rank]
        self._bucket_at = {buffer.data_ptr(): index for index, buffer in enumerate(self.buffers)}
        self._pieces = [_pieces([rank_buffers[i] for rank_buffers in everywhere], rank) for i in range(len(specs))]

    def start(self, flat: Tensor) -> _Ticket:
        """The bucket at ``flat`` is filled."""
        self._started += 1
        self._queue.append((self._started, self._bucket_at[flat.data_ptr()]))
        self._counters[self._rank][_FILLED] = self._started
        while self._queue and self._lagging(_FILLED, self._queue[0][0]) is None:
            self._sum_next()
        return _Ticket(self, self._started)

    def finish(self, number: int) -> None:
        """Return when the ``number``-th reduction is in place on this rank."""
        while self._queue and self._queue[0][0] <= number:
            self._wait(_FILLED, self._queue[0][0])
            self._sum_next()
        self._wait(_SUMMED, number)

    def give_up(self) -> None:
        """Leave a mark that those who wait will find."""
        self._counters[self._rank][_BROKEN] = 1

    def _sum_next(self) -> None:
        number, bucket = self._queue.popleft()
        for own, others in self._pieces[bucket]:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)
        self._counters[self._rank][_SUMMED] = number

    def _lagging(self, counter: int, number: int) -> int | None:
        """A rank whose counter has not come so far."""
        for rank, counters in enumerate(self._counters):
            if counters[counter] < number:
                return rank
        return None

    def _wait(self, counter: int, number: int) -> None:
        for _ in range(_SPINS):
            if self._lagging(counter, number) is None:
                return
        began = looked = time.monotonic()
        pause = 0.0
        while (rank := self._lagging(counter, number)) is not None:
            time.sleep(pause)
            now = time.monotonic()
            pause = 0.0 if now - began < _YIELD_S else _PAUSE_S
            if now - looked > _LIVENESS_INTERVAL_S:
                looked = now
                self._check_alive(counter, number)
            if now - began > self._timeout_s:
                self._break(f"rank {rank} did not come within {self._timeout_s:g} s")

    def _check_alive(self, counter: int, number: int) -> None:
        dead = self._peers.first_dead()
        # Whoever ended after it had done its part is not missed; its counter was written before it ended.
        if dead is not None and self._counters[dead[0]][counter] < number:
            self._break(f"rank {dead[0]} (process {dead[1]}) has died")
        for rank, counters in enumerate(self._counters):
            if counters[_BROKEN]:
                self._break(f"rank {rank} gave up: its error says why")

    def _break(self, reason: str) -> None:
        self.give_up()
        raise CollectiveFailed(reason)


class _Ticket:
    """One reduction under way."""

    def __init__(self, arena: _Arena, number: int) -> None:
        self._arena = arena
        self._number = number

    def wait(self) -> None:
        """Return when the sum is in place."""
        self._arena.finish(self._number)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _buffers(segment: object, specs: Sequence[tuple[int, torch.dtype, torch.device]]) -> list[Tensor]:
    buffers, offset = [], _HEADER_BYTES
    for numel, dtype, _ in specs:
        if numel:
            buffers.append(torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset))
        else:
            buffers.append(torch.empty(0, dtype=dtype))
        offset += _aligned(numel * dtype.itemsize)
    return buffers


def _pieces(everywhere: Sequence[Tensor], rank: int) -> list[tuple[Tensor, list[Tensor]]]:
    """This rank's slice in pieces: for each its own memory, and that of the other ranks in a fixed order."""
    world_size, numel = len(everywhere), everywhere[0].numel()
    width = max(1, _ALIGNMENT // everywhere[0].element_size())
    share = -(-numel // (world_size * width)) * width
    start, end = min(numel, rank * share), min(numel, (rank + 1) * share)
    step = PIECE_BYTES // everywhere[0].element_size()
    pieces = []
    for begin in range(start, end, step):
        views = [buffer[begin : min(end, begin + step)] for buffer in everywhere]
        pieces.append((views[rank], [view for other, view in enumerate(views) if other != rank]))
    return pieces


def _timeout_s(group: dist.ProcessGroup) -> float:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else _DEFAULT_TIMEOUT_S
