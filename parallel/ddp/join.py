"""Uneven inputs: a rank that has run out of them takes part in the others' collectives with zeros.

torch's ``Join`` context asks for this hook; it calls `main_hook` once for each step that some rank still makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
            ddp.sync_buffers_from(ddp.find_common_rank(candidate=False))
        reduces = ddp.anyone_reduces(this_rank=False)
        ddp.require_forward_param_sync = reduces
        if reduces:
            ddp.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done: take the model of a rank that trained to the end."""
        self._ddp.sync_module_from(self._ddp.find_common_rank(candidate=is_last_joiner))
