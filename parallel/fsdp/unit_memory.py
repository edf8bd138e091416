"""Where the parameters of one unit lie: this rank's rows for good, the whole tensors while they are needed.

`ResidentMemory` has the whole at hand all the time (one rank, or memory that the ranks of a host share);
`GatheredMemory` fetches it and frees it. Whole tensors are views of one buffer whose storage is given back when they
are freed; they are written through an alias that autograd does not watch, for the values are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .exchange import Exchange, Gather
from .near_ranks import NearRanks
from .shard_layout import ShardLayout

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What memory must know of a parameter.

    Attributes:
        layout: how it is cut.
        dtype: in which its rows are kept.
        compute_dtype: in which it is whole.
    """

    layout: ShardLayout
    dtype: torch.dtype
    compute_dtype: torch.dtype


class UnitMemory(Protocol):
    """The memory of one unit."""

    rows: list[Tensor]
    wholes: list[Tensor]

    def begin_gather(self) -> None:
        """Start to make ``wholes`` valid; returns at once."""

    def finish_gather(self) -> None:
        """Return when ``wholes`` are valid."""

    def free(self) -> None:
        """Give ``wholes`` back; their contents are gone."""

    def free_but_near(self) -> None:
        """The same, but the next gather may be among near ranks, if the unit has any."""

    def forget_near(self) -> None:
        """The next gather is among all."""


class ResidentMemory:
    """Nothing to fetch and nothing to free.

    Args:
        rows: this rank's rows; they share memory with ``wholes``, but not the version counter.
        wholes: the parameters.
        fence: returns when all ranks have written their rows.
    """

    def __init__(self, rows: list[Tensor], wholes: list[Tensor], fence: Callable[[], None]) -> None:
        self.rows, self.wholes, self._fence = rows, wholes, fence

    def begin_gather(self) -> None:
        """The whole is there."""

    def finish_gather(self) -> None:
        """The whole is there once all have written."""
        self._fence()

    def free(self) -> None:
        """It is other ranks' memory too."""

    def free_but_near(self) -> None:
        """It is other ranks' memory too."""

    def forget_near(self) -> None:
        """Everyone is near."""


class GatheredMemory:
    """Whole tensors in one buffer that exists from the start of a gather until it is freed.

    Attributes:
        kept: this rank's pieces of what near ranks keep between forward and backward.
    """

    def __init__(
        self,
        rows: list[Tensor],
        specs: Sequence[ParameterSpec],
        device: torch.device,
        exchange: Exchange,
        near: NearRanks | None = None,
    ) -> None:
        self.rows = rows
        self._near = near
        self.kept: list[Tensor] | None = None
        self._layouts = [spec.layout for spec in specs]
        self._dtypes = [spec.compute_dtype for spec in specs]
        self._device = device
        self._exchange = exchange
        self._gather: Gather | None = None
        offsets, self._nbytes = _offsets(specs)
        self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        self._targets = _views(self._buffer, specs, offsets)
        self.wholes = _views(self._buffer.data, specs, offsets)
        self.free()

    def begin_gather(self) -> None:
        """Allocate, and let the pieces come."""
        self._buffer.untyped_storage().resize_(self._nbytes)
        if self._near is not None and self.kept is not None:
            self._gather = self._near.gather(self.kept, self._targets)
            return
        pieces = [
            rows.to(device=self._device, dtype=dtype, non_blocking=True)
            for rows, dtype in zip(self.rows, self._dtypes, strict=True)
        ]
        self._gather = self._exchange.gather(pieces, self._targets, self._layouts)

    def finish_gather(self) -> None:
        """Wait for the pieces."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def free(self) -> None:
        """Give the storage back."""
        self.finish_gather()
        self.kept = None
        self._buffer.untyped_storage().resize_(0)

    def free_but_near(self) -> None:
        """Give the storage back and keep this rank's pieces of what was in it."""
        self.finish_gather()
        self.kept = self._near.pieces(self._targets) if self._near is not None else None
        self._buffer.untyped_storage().resize_(0)

    def forget_near(self) -> None:
        """Give the pieces back as well."""
        self.kept = None


class ResidentExchange:
    """Gathers for a `GatheredMemory` by copying from tensors that are whole already, into another type or device."""

    def __init__(self, wholes: Sequence[Tensor], fence: Callable[[], None]) -> None:
        self._wholes, self._fence = wholes, fence

    def gather(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Gather:
        """The copy is made when it is waited for."""
        return _Copy(self._wholes, wholes, self._fence)

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> _Alone:
        """The sum over one rank."""
        return _Alone(list(wholes), layouts)


class _Copy:
    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], fence: Callable[[], None]) -> None:
        self._sources, self._targets, self._fence = sources, targets, fence

    def wait(self) -> None:
        self._fence()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)


class _Alone:
    def __init__(self, wholes: list[Tensor], layouts: Sequence[ShardLayout]) -> None:
        self._wholes, self._layouts = wholes, layouts

    def wait(self) -> list[Tensor]:
        return [whole.view(layout.shard_shape(0)) for whole, layout in zip(self._wholes, self._layouts, strict=True)]


def aligned(nbytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _offsets(specs: Sequence[ParameterSpec]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += aligned(spec.layout.numel * spec.compute_dtype.itemsize)
    return offsets, end


def _views(buffer: Tensor, specs: Sequence[ParameterSpec], offsets: Sequence[int]) -> list[Tensor]:
    views = []
    for spec, offset in zip(specs, offsets, strict=True):
        nbytes = spec.layout.numel * spec.compute_dtype.itemsize
        views.append(buffer[offset : offset + nbytes].view(spec.compute_dtype).view(spec.layout.shape))
    return views
