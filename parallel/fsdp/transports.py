"""How the ranks of a unit reach each other: alone, over torch.distributed, or through the memory of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..transport.base import is_gloo_on_cpus
from ..transport.shared_memory import can_share_memory
from ..transport.shared_segments import map_segments
from .exchange import Exchange, FlatExchange, PairwiseExchange, Reduction
from .near_ranks import NearRanks, near_group
from .shard_layout import ShardLayout
from .shared_counters import Counter, SharedCounters
from .shared_gradients import SharedGradients
from .unit_memory import GatheredMemory, ParameterSpec, ResidentExchange, ResidentMemory, UnitMemory, aligned

WISHES = ("auto", "torch", "flat", "shared_memory")
_VARIABLE = "DLAUNCH_FSDP_TRANSPORT"


class Transport(Protocol):
    """Memory and sums for the units of one group of ranks.

    Attributes:
        name: for people.
        group: the ranks; ``None`` if there is only one.
    """

    name: str
    group: dist.ProcessGroup | None
    rank: int
    world_size: int

    def memory(
        self, specs: Sequence[ParameterSpec], device: torch.device, offload: bool, near: int | None = None
    ) -> UnitMemory:
        """Memory for one unit whose whole parameters are used on ``device``; all ranks call it together.

        ``near`` ranks keep the whole among them between forward and backward, where nothing is shared anyway.
        """

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Begin to sum contiguous tensors; each rank gets its piece."""

    def begin_reading(self) -> None:
        """This rank's rows are as the coming forward shall see them."""

    def end_reading(self) -> None:
        """Return when no rank reads this rank's rows any more."""

    def give_up(self) -> None:
        """Let the others know, where that is possible, that this rank will not take part any more."""


class AloneTransport:
    """One rank: its rows are the whole."""

    name = "alone"
    group: dist.ProcessGroup | None = None
    rank = 0
    world_size = 1

    def memory(
        self, specs: Sequence[ParameterSpec], device: torch.device, offload: bool, near: int | None = None
    ) -> UnitMemory:
        """The whole in one place, and another only if the type or the device differs."""
        home = torch.device("cpu") if offload else device
        rows = _own_rows(specs, 0, home)
        wholes = [row.data.view(spec.layout.shape) for row, spec in zip(rows, specs, strict=True)]
        if offload or any(spec.dtype != spec.compute_dtype for spec in specs):
            return GatheredMemory(rows, specs, device, ResidentExchange(wholes, _nothing))
        return ResidentMemory(rows, wholes, _nothing)

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """The gradients themselves."""
        return ResidentExchange((), _nothing).reduce(wholes, layouts)

    def begin_reading(self) -> None:
        """Nobody else writes."""

    def end_reading(self) -> None:
        """Nobody else reads."""

    def give_up(self) -> None:
        """Nobody waits."""


class TorchTransport:
    """Rows in each rank's own memory; the whole comes over the process group."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, exchange_over: Callable[[dist.ProcessGroup], Exchange]) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group, self._exchange_over = group, exchange_over
        self._exchange = exchange_over(group)
        self._near: dict[int, NearRanks] = {}

    def memory(
        self, specs: Sequence[ParameterSpec], device: torch.device, offload: bool, near: int | None = None
    ) -> UnitMemory:
        """Rows on the device, or on the host if they are offloaded."""
        rows = _own_rows(specs, self.rank, torch.device("cpu") if offload else device)
        return GatheredMemory(rows, specs, device, self._exchange, self._near_ranks(near))

    def _near_ranks(self, size: int | None) -> NearRanks | None:
        if size is None or self.world_size % size:  # the world may have become another one
            return None
        if size not in self._near:
            exchange = self._exchange_over(near_group(self._group, size))
            self._near[size] = NearRanks(exchange, self.rank % size, size)
        return self._near[size]

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Over the process group."""
        return self._exchange.reduce(wholes, layouts)

    def begin_reading(self) -> None:
        """Others get copies."""

    def end_reading(self) -> None:
        """Others have copies."""

    def give_up(self) -> None:
        """Backends have no word for it."""


class SharedTransport:
    """Rows and wholes in memory that all ranks of one host map. See [Note: parameters in shared memory]."""

    name = "shared_memory"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._shared_group = group
        self.group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._counters = SharedCounters(group)
        self._gradients = SharedGradients(group, self._counters)
        self._begun = 0
        self._ended = 0

    def memory(
        self, specs: Sequence[ParameterSpec], device: torch.device, offload: bool, near: int | None = None
    ) -> UnitMemory:
        """One segment for the unit; the first rank's, though all use it alike."""
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end += aligned(spec.layout.numel * spec.dtype.itemsize)
        segments = map_segments(max(end, 64), self._shared_group)
        if segments is None:
            raise OSError("the ranks can no longer map each other's memory")
        segment = segments.maps[0]
        wholes = [
            _segment_view(segment, spec.dtype, offset, 0, spec.layout.numel).view(spec.layout.shape)
            for spec, offset in zip(specs, offsets, strict=True)
        ]
        rows = [
            _segment_view(segment, spec.dtype, offset, *spec.layout.span(self.rank)).view(
                spec.layout.shard_shape(self.rank)
            )
            for spec, offset in zip(specs, offsets, strict=True)
        ]
        if offload or any(spec.dtype != spec.compute_dtype for spec in specs):
            return GatheredMemory(rows, specs, device, ResidentExchange(wholes, self._wait_for_writers))
        return ResidentMemory(rows, wholes, self._wait_for_writers)

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Through the ring of shared slots."""
        return self._gradients.reduce(wholes, layouts)

    def begin_reading(self) -> None:
        """Announce it; whoever reads waits for all."""
        self._begun += 1
        self._counters.set(Counter.WRITTEN, self._begun)

    def _wait_for_writers(self) -> None:
        self._counters.wait(Counter.WRITTEN, self._begun)

    def end_reading(self) -> None:
        """Announce it and wait for all."""
        self._ended += 1
        self._counters.set(Counter.READ, self._ended)
        self._counters.wait(Counter.READ, self._ended)

    def give_up(self) -> None:
        """Ranks that wait for this one raise at once."""
        self._counters.give_up()


def _nothing() -> None:
    """One rank waits for nobody."""


def _own_rows(specs: Sequence[ParameterSpec], rank: int, device: torch.device) -> list[Tensor]:
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return [
        torch.empty(spec.layout.shard_shape(rank), dtype=spec.dtype, device=device, pin_memory=pinned) for spec in specs
    ]


def _segment_view(segment: object, dtype: torch.dtype, offset: int, begin: int, end: int) -> Tensor:
    if begin == end:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(segment, dtype=dtype, count=end - begin, offset=offset + begin * dtype.itemsize)


_CHOSEN: WeakIdKeyDictionary = WeakIdKeyDictionary()  # one for each group: units share counters and slots


def transport_for(group: dist.ProcessGroup | None, device: torch.device, wish: str | None) -> Transport:
    """The transport of a group; all its ranks call this together with the same wish.

    Args:
        group: ``None`` for a rank of its own.
        device: where the units compute.
        wish: one of ``WISHES``; ``None`` takes the variable ``DLAUNCH_FSDP_TRANSPORT`` and then ``"auto"``: shared
            memory if all ranks are on one host and on CPUs, else the process group.

    Raises:
        ValueError: there is no such transport.
        RuntimeError: shared memory was asked for and the ranks cannot share it.
    """
    wish = wish or os.environ.get(_VARIABLE, "auto")
    if wish not in WISHES:
        raise ValueError(f"transport is one of {', '.join(WISHES)}, not {wish!r}.")
    if group is None or dist.get_world_size(group) == 1:
        return AloneTransport()
    known: dict[tuple[str, str], Transport] = _CHOSEN.setdefault(group, {})  # type: ignore[no-untyped-call]
    key = (wish, device.type)
    if key not in known:
        known[key] = _make(group, device, wish)
    return known[key]


def _make(group: dist.ProcessGroup, device: torch.device, wish: str) -> Transport:
    gloo = device.type == "cpu" and is_gloo_on_cpus(group)
    if wish == "shared_memory" or (wish == "auto" and gloo):
        if device.type == "cpu" and can_share_memory(group):
            return SharedTransport(group)
        if wish == "shared_memory":
            raise RuntimeError(
                "transport='shared_memory' needs parameters on CPUs and all ranks as processes of one user on one "
                "x86-64 Linux host that see each other under /proc. Use transport='auto', which takes it where it can."
            )
    return TorchTransport(group, PairwiseExchange if gloo and wish != "flat" else FlatExchange)
