"""Uneven inputs: a rank that has run out of them takes part in the others' collectives with zeros.

torch's ``Join`` context asks for this hook; it calls `main_hook` once for each step that some rank still makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from .distributed_data_parallel import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """Mirrors what a forward and a backward of ``ddp`` communicate, in the same order."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """One step of the others."""
        ddp = self._ddp
        if ddp.will_sync_module_buffers():
            ddp.sync_buffers_from(find_common_rank(ddp, candidate=False))
        reduces = anyone_reduces(ddp, this_rank=False)
        ddp.require_forward_param_sync = reduces
        if reduces:
            ddp.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done: take the model of a rank that trained to the end."""
        self._ddp.sync_module_from(find_common_rank(self._ddp, candidate=is_last_joiner))


def take_divisor(ddp: DistributedDataParallel, training: Any) -> None:
    """Divide sums by the number of ranks that still train, where the user wants it so; ``training`` counts them."""
    training.wait()
    initial = ddp.reducer.communication.world_size
    ddp.reducer.divisor = initial if ddp.divide_by_initial_world_size else int(training.result()[0].item())


def anyone_reduces(ddp: DistributedDataParallel, *, this_rank: bool) -> bool:
    """Tell the others whether the next backward is reduced here; return whether it is on any rank."""
    wish = torch.tensor(int(this_rank), device=ddp.device)
    dist.all_reduce(wish, group=ddp.process_group)
    return bool(wish.item())


def find_common_rank(ddp: DistributedDataParallel, *, candidate: bool) -> int:
    """The highest rank of the group that is a candidate."""
    rank = torch.tensor(dist.get_rank(ddp.process_group) if candidate else -1, device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return int(rank.item())
