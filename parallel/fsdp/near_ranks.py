"""A smaller world between forward and backward: a few ranks keep the whole among them, and gather from one another.

``reshard_after_forward=8`` of 64 ranks: after a unit's forward each eight neighbours hold its parameters between them,
so that the gather for the backward stays among them (in one node, say), at the cost of 1/8 instead of 1/64 of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, Gather
from .shard_layout import ShardLayout


def resharding_of(wish: bool | int | None, world_size: int) -> tuple[bool | None, int | None]:
    """What ``reshard_after_forward`` means in a world: whether to free after forward, and how many near ranks keep it.

    Raises:
        ValueError: a number that does not divide the world.
    """
    if wish is None or isinstance(wish, bool):
        return wish, None
    if wish < 1 or world_size % wish:
        raise ValueError(
            f"reshard_after_forward is a bool, or a number that divides the {world_size} ranks; not {wish}"
        )
    if wish == 1:
        return False, None
    return True, None if wish == world_size else wish


def near_group(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """The ranks next to this one, ``size`` of them; all ranks of the group call it together."""
    ranks = dist.get_process_group_ranks(group)
    begin = dist.get_rank(group) // size * size
    near: dist.ProcessGroup = dist.new_group(ranks[begin : begin + size], use_local_synchronization=True)
    return near


@dataclass(frozen=True)
class NearRanks:
    """Keeps pieces of whole tensors among near ranks.

    Attributes:
        exchange: over their group.
        rank: this process's among them.
        world_size: their number.
    """

    exchange: Exchange
    rank: int
    world_size: int

    def pieces(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Copies of what this rank keeps."""
        kept = []
        for whole, layout in zip(wholes, self._layouts(wholes), strict=True):
            begin, end = layout.span(self.rank)
            kept.append(whole.view(-1)[begin:end].view(layout.shard_shape(self.rank)).clone())
        return kept

    def gather(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor]) -> Gather:
        """Begin to fill ``wholes`` again."""
        return self.exchange.gather(pieces, wholes, self._layouts(wholes))

    def _layouts(self, wholes: Sequence[Tensor]) -> list[ShardLayout]:
        return [ShardLayout(tuple(whole.shape), self.world_size) for whole in wholes]
