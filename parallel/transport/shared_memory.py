"""Buckets summed through memory that all ranks of one host share.

[Note: a reduction in shared memory]
Every rank's bucket lies in its own segment, and every rank maps all segments. A bucket is cut into one slice for each
rank. When all ranks have filled a bucket, each sums its slice over all segments, in pieces that stay in the processor's
second-level cache, and writes each sum to all of them. So every gradient is read and written once for each rank, no
byte passes through a socket, and all ranks hold the same bits.

Each rank owns two counters: ``filled`` (buckets that hold its gradients) and ``summed`` (buckets whose slice it has
written); see [Note: counters]. Work is done by the thread that trains, when it starts a bucket and when it waits:
another thread would compete with it for the processor and the interpreter.
"""

from __future__ import annotations

import platform
import sys
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from .base import Pending, TorchTransport
from .byte_gather import all_gather_bytes
from .counters import FIRST_PLACE, HEADER_BYTES, Counters, timeout_of
from .shared_segments import Segments, host_identity, map_segments

PIECE_BYTES = 256 * 1024
_ALIGNMENT = 64  # a cache line
_FILLED, _SUMMED = range(FIRST_PLACE, FIRST_PLACE + 16, 8)


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
        segments = map_segments(HEADER_BYTES + sum(sizes), self._group)
        if segments is None:
            self.name = "torch"
            return self._fallback.allocate(specs)
        self._arena = _Arena(segments, specs, dist.get_rank(self._group), timeout_of(self._group))
        return self._arena.buffers

    def all_reduce(self, flat: Tensor) -> Pending:
        """Begin: tell the others that the bucket is filled, and sum what is already filled everywhere."""
        if self._arena is None:
            return self._fallback.all_reduce(flat)
        return self._arena.start(flat)

    def give_up(self) -> None:
        """Ranks that wait for this one raise at once."""
        self._fallback.give_up()
        if self._arena is not None:
            self._arena.give_up()

    def watch(self, work: Work) -> Pending:
        """As the process group's own transport does."""
        return self._fallback.watch(work)

    def close(self) -> None:
        """Unmap as soon as no gradient lies there any more."""
        self._arena = None


class _Arena:
    """One set of buckets in one set of segments."""

    def __init__(
        self, segments: Segments, specs: Sequence[tuple[int, torch.dtype, torch.device]], rank: int, timeout_s: float
    ) -> None:
        self._counters = Counters(segments, rank, timeout_s)
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
        self._counters.set(_FILLED, self._started)
        while self._queue and self._counters.all_have(_FILLED, self._queue[0][0]):
            self._sum_next()
        return _Ticket(self, self._started)

    def finish(self, number: int) -> None:
        """Return when the ``number``-th reduction is in place on this rank."""
        while self._queue and self._queue[0][0] <= number:
            self._counters.wait(_FILLED, self._queue[0][0])
            self._sum_next()
        self._counters.wait(_SUMMED, number)

    def give_up(self) -> None:
        """Leave a mark that those who wait will find."""
        self._counters.give_up()

    def _sum_next(self) -> None:
        number, bucket = self._queue.popleft()
        for own, others in self._pieces[bucket]:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)
        self._counters.set(_SUMMED, number)


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
    buffers, offset = [], HEADER_BYTES
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
