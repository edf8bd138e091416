"""Moving pieces of tensors between ranks: what a unit asks of a transport, and two forms over torch.distributed.

`PairwiseExchange` sends each piece straight from where it lies to where it belongs: the fastest over gloo.
`FlatExchange` makes one flat copy in, one collective, one flat copy out: for fast collectives (NCCL's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .shard_layout import Messages, ShardLayout, messages_of

# torch 2.13 renamed them; both names do the same.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(Protocol):
    """Pieces on their way into whole tensors."""

    def wait(self) -> None:
        """Return when the whole tensors are complete."""


class Reduction(Protocol):
    """Whole tensors on their way to be summed."""

    def wait(self) -> list[Tensor]:
        """This rank's piece of each sum, of its shard shape; new memory."""


class Exchange(Protocol):
    """Both ways, for the tensors of one unit. All ranks start the same exchanges in the same order."""

    def gather(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Gather:
        """Begin to fill ``wholes`` from the pieces of all ranks; data types are alike in pairs."""

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Begin to sum contiguous ``wholes`` over the ranks; each rank gets its piece of the sum."""


def _messages(tensors: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Messages:
    return messages_of(layouts, [(tensor.dtype, tensor.element_size()) for tensor in tensors])


def _flat(whole: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    begin, end = layout.span(rank)
    return whole.view(-1)[begin:end]


class PairwiseExchange:
    """Every rank sends to every other what that one needs, and no more."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._peers = [(self._rank + step) % self._world_size for step in range(1, self._world_size)]

    def gather(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Gather:
        """Large pieces are received where they belong."""
        kinds = _messages(pieces, layouts)
        own = [pieces[index] for index in kinds.alone]
        own += [torch.cat([pieces[index].view(-1) for index in indices]) for indices in kinds.packed]
        works: list[dist.Work] = []
        received: list[tuple[int, list[Tensor]]] = []
        for peer in self._peers:
            arriving = [_flat(wholes[index], layouts[index], peer) for index in kinds.alone]
            packs = [self._pack_for(peer, indices, wholes, layouts) for indices in kinds.packed]
            works += self._receive([*arriving, *packs], peer)
            received.append((peer, packs))
        for peer in self._peers:
            works += self._send(own, peer)
        for piece, whole, layout in zip(pieces, wholes, layouts, strict=True):
            _flat(whole, layout, self._rank).copy_(piece.view(-1))
        return _PairwiseGather(works, kinds, received, wholes, layouts)

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Each rank sums its pieces in the order of ranks, so the result does not depend on who comes first."""
        kinds = _messages(wholes, layouts)
        own = self._pieces_for(self._rank, kinds, wholes, layouts)
        works: list[dist.Work] = []
        parts: dict[int, list[Tensor]] = {self._rank: own}
        for peer in self._peers:
            parts[peer] = [torch.empty_like(piece) for piece in own]
            works += self._receive(parts[peer], peer)
        leaving = []
        for peer in self._peers:
            leaving.append(self._pieces_for(peer, kinds, wholes, layouts))
            works += self._send(leaving[-1], peer)
        ordered = [parts[rank] for rank in range(self._world_size)]
        return _PairwiseReduction(works, kinds, ordered, leaving, layouts, self._rank)

    def _pieces_for(
        self, rank: int, kinds: Messages, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]
    ) -> list[Tensor]:
        pieces = [_flat(wholes[index], layouts[index], rank) for index in kinds.alone]
        for indices in kinds.packed:
            pieces.append(torch.cat([_flat(wholes[index], layouts[index], rank) for index in indices]))
        return pieces

    def _pack_for(
        self, rank: int, indices: Sequence[int], like: Sequence[Tensor], layouts: Sequence[ShardLayout]
    ) -> Tensor:
        spans = [layouts[index].span(rank) for index in indices]
        return like[indices[0]].new_empty(sum(end - begin for begin, end in spans))

    def _send(self, tensors: Sequence[Tensor], peer: int) -> list[dist.Work]:
        to = dist.get_global_rank(self._group, peer)
        return [work for tensor in tensors if tensor.numel() and (work := dist.isend(tensor, to, group=self._group))]

    def _receive(self, tensors: Sequence[Tensor], peer: int) -> list[dist.Work]:
        source = dist.get_global_rank(self._group, peer)
        return [
            work for tensor in tensors if tensor.numel() and (work := dist.irecv(tensor, source, group=self._group))
        ]


class _PairwiseGather:
    def __init__(
        self,
        works: list[dist.Work],
        kinds: Messages,
        received: list[tuple[int, list[Tensor]]],
        wholes: Sequence[Tensor],
        layouts: Sequence[ShardLayout],
    ) -> None:
        self._works, self._kinds, self._received = works, kinds, received
        self._wholes, self._layouts = wholes, layouts

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for peer, packs in self._received:
            for indices, pack in zip(self._kinds.packed, packs, strict=True):
                places = [_flat(self._wholes[index], self._layouts[index], peer) for index in indices]
                torch._foreach_copy_(places, list(torch.split(pack, [place.numel() for place in places])))


class _PairwiseReduction:
    def __init__(
        self,
        works: list[dist.Work],
        kinds: Messages,
        parts: list[list[Tensor]],
        leaving: list[list[Tensor]],
        layouts: Sequence[ShardLayout],
        rank: int,
    ) -> None:
        self._works, self._kinds, self._parts, self._leaving = works, kinds, parts, leaving
        self._layouts, self._rank = layouts, rank

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._leaving = []
        sums = [self._sum(number) for number in range(len(self._parts[0]))]
        shapes = [layout.shard_shape(self._rank) for layout in self._layouts]
        pieces: dict[int, Tensor] = dict(zip(self._kinds.alone, sums, strict=False))
        for indices, pack in zip(self._kinds.packed, sums[len(self._kinds.alone) :], strict=True):
            spans = [self._layouts[index].span(self._rank) for index in indices]
            pieces.update(zip(indices, torch.split(pack, [end - begin for begin, end in spans]), strict=True))
        return [pieces[index].view(shape) for index, shape in enumerate(shapes)]

    def _sum(self, number: int) -> Tensor:
        """In the memory of a piece that came: one of the first two did. Their sum is the same either way round."""
        first, second, *others = (parts[number] for parts in self._parts)
        total, other = (second, first) if self._rank == 0 else (first, second)
        total += other
        for part in others:
            total += part
        return total


class FlatExchange:
    """One flat buffer for each data type, and the backend's own collectives. Padding lives only in the buffers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def gather(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Gather:
        """Copy in and begin."""
        return _FlatGather([self._begin(indices, pieces, layouts) for indices in _by_dtype(pieces)], wholes, layouts)

    def _begin(
        self, indices: list[int], pieces: Sequence[Tensor], layouts: Sequence[ShardLayout]
    ) -> tuple[list[int], Tensor, dist.Work | None]:
        offsets, width = _offsets([layouts[index] for index in indices])
        own = pieces[indices[0]].new_empty(width)
        places = [own[offset : offset + pieces[i].numel()] for i, offset in zip(indices, offsets, strict=True)]
        torch._foreach_copy_(places, [pieces[index].view(-1) for index in indices])
        everyones = own.new_empty(self._world_size, width)
        return indices, everyones, _all_gather_flat(everyones.view(-1), own, self._group, async_op=True)

    def reduce(self, wholes: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Reduction:
        """Copy in and begin."""
        begun = []
        for indices in _by_dtype(wholes):
            offsets, width = _offsets([layouts[index] for index in indices])
            flat = wholes[indices[0]].new_zeros(self._world_size, width)
            for rank in range(self._world_size):
                pieces = [_flat(wholes[index], layouts[index], rank) for index in indices]
                places = [
                    flat[rank, offset : offset + piece.numel()] for piece, offset in zip(pieces, offsets, strict=True)
                ]
                torch._foreach_copy_(places, pieces)
            total = flat.new_empty(width)
            work = _reduce_scatter_flat(total, flat.view(-1), group=self._group, async_op=True)
            begun.append((indices, offsets, total, work, flat))
        return _FlatReduction(begun, layouts, self._rank)


class _FlatGather:
    def __init__(
        self,
        begun: list[tuple[list[int], Tensor, dist.Work | None]],
        wholes: Sequence[Tensor],
        layouts: Sequence[ShardLayout],
    ) -> None:
        self._begun, self._wholes, self._layouts = begun, wholes, layouts

    def wait(self) -> None:
        for indices, everyones, work in self._begun:
            if work is not None:
                work.wait()
            offsets, _ = _offsets([self._layouts[index] for index in indices])
            for rank, flat in enumerate(everyones):
                places = [_flat(self._wholes[index], self._layouts[index], rank) for index in indices]
                pieces = [flat[offset : offset + p.numel()] for offset, p in zip(offsets, places, strict=True)]
                torch._foreach_copy_(places, pieces)


class _FlatReduction:
    def __init__(
        self,
        begun: list[tuple[list[int], list[int], Tensor, dist.Work | None, Tensor]],
        layouts: Sequence[ShardLayout],
        rank: int,
    ) -> None:
        self._begun, self._layouts, self._rank = begun, layouts, rank

    def wait(self) -> list[Tensor]:
        pieces: dict[int, Tensor] = {}
        for indices, offsets, total, work, _ in self._begun:
            if work is not None:
                work.wait()
            for index, offset in zip(indices, offsets, strict=True):
                begin, end = self._layouts[index].span(self._rank)
                shape = self._layouts[index].shard_shape(self._rank)
                pieces[index] = total[offset : offset + end - begin].view(shape)
        return [pieces[index] for index in range(len(pieces))]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _offsets(layouts: Sequence[ShardLayout]) -> tuple[list[int], int]:
    """Where each full piece begins in a flat buffer, and the buffer's length."""
    offsets, end = [], 0
    for layout in layouts:
        offsets.append(end)
        end += layout.rows_per_rank * layout.row_numel
    return offsets, end
