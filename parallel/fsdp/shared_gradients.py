"""Gradients summed through memory that the ranks of a host share: a ring of two slots on each rank.

A rank copies a unit's gradients into its slot and counts it as filled; when all have, each sums its own rows over
all ranks' slots, in the order of ranks. A slot is used again when all have summed what was in it before.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collective_error import CollectiveError
from ..transport.shared_segments import map_segments
from .shard_layout import ShardLayout
from .shared_counters import Counter, SharedCounters
from .unit_memory import aligned

_SLOTS = 2


class SharedGradients:
    """The ring; all ranks use it for the same units in the same order."""

    def __init__(self, group: dist.ProcessGroup, counters: SharedCounters) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._counters = counters
        self._slot_bytes = 0
        self._maps: tuple[mmap.mmap, ...] = ()
        self._started = 0
        self._queue: deque[SharedReduction] = deque()

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> SharedReduction:
        """Copy in, tell the others, and sum what is filled everywhere."""
        offsets, nbytes = _places(wholes)
        if nbytes > self._slot_bytes:
            self._grow(nbytes)
        while len(self._queue) >= _SLOTS:
            self._sum_next()
        self._counters.wait(Counter.SUMMED, self._started + 1 - _SLOTS)
        self._started += 1
        base = (self._started % _SLOTS) * self._slot_bytes
        places = [base + offset for offset in offsets]
        for whole, place in zip(wholes, places, strict=True):
            _view(self._maps[self._rank], whole, place, 0, whole.numel()).copy_(whole.view(-1))
        self._counters.set(Counter.FILLED, self._started)
        rows = [self._rows(place, whole, layout) for place, whole, layout in zip(places, wholes, layouts, strict=True)]
        reduction = SharedReduction(self, self._started, rows, [layout.shard_shape(self._rank) for layout in layouts])
        self._queue.append(reduction)
        while self._queue and self._counters.all_have(Counter.FILLED, self._queue[0].number):
            self._sum_next()
        return reduction

    def finish(self, reduction: SharedReduction) -> None:
        """Return when this rank's rows of that reduction are summed."""
        while reduction.sums is None:
            self._sum_next()

    def _rows(self, place: int, whole: Tensor, layout: ShardLayout) -> list[Tensor]:
        begin, end = layout.span(self._rank)
        return [_view(segment, whole, place, begin, end) for segment in self._maps]

    def _sum_next(self) -> None:
        reduction = self._queue[0]
        self._counters.wait(Counter.FILLED, reduction.number)
        sums = []
        for parts, shape in zip(reduction.rows, reduction.shapes, strict=True):
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            sums.append(total.view(shape))
        self._queue.popleft()
        reduction.sums = sums
        reduction.rows = []
        self._counters.set(Counter.SUMMED, reduction.number)

    def _grow(self, nbytes: int) -> None:
        """All ranks meet their largest unit at the same reduction."""
        while self._queue:
            self._sum_next()
        segments = map_segments(nbytes * _SLOTS, self._group)
        if segments is None:
            raise CollectiveError("FSDP in shared memory: the ranks can no longer map each other's memory")
        self._maps, self._slot_bytes = segments.maps, nbytes


class SharedReduction:
    """One unit's sums on their way.

    Attributes:
        number: of the reduction.
        rows: this rank's rows in the slots of all ranks, for each tensor; empty once summed.
        shapes: of the sums.
        sums: the result, once it is there.
    """

    def __init__(
        self, ring: SharedGradients, number: int, rows: list[list[Tensor]], shapes: list[tuple[int, ...]]
    ) -> None:
        self._ring = ring
        self.number, self.rows, self.shapes = number, rows, shapes
        self.sums: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """This rank's pieces."""
        self._ring.finish(self)
        return self.sums or []


def _places(wholes: Sequence[Tensor]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for whole in wholes:
        offsets.append(end)
        end += aligned(whole.numel() * whole.element_size())
    return offsets, max(end, 64)


def _view(segment: mmap.mmap, like: Tensor, place: int, begin: int, end: int) -> Tensor:
    if end == begin:
        return torch.empty(0, dtype=like.dtype)
    return torch.frombuffer(segment, dtype=like.dtype, count=end - begin, offset=place + begin * like.element_size())
