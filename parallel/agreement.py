"""Small numbers that all ranks of a group must hold alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there are no other ranks to agree with: no process group yet, or a group of one."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return dist.get_world_size(group) == 1


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) in the group; (0, 1) without one."""
    return (0, 1) if is_alone(group) else (dist.get_rank(group), dist.get_world_size(group))


def from_first_rank(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The first rank's ``values`` (as many on every rank), on every rank. A collective."""
    if is_alone(group):
        return list(values)
    shared = _tensor(values, group)
    dist.broadcast(shared, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return [int(value) for value in shared.tolist()]


def largest(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The largest of each value over all ranks, on every rank. A collective."""
    if is_alone(group):
        return list(values)
    shared = _tensor(values, group)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in shared.tolist()]


def _tensor(values: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    only_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")
    return torch.tensor(list(values), dtype=torch.int64, device=device)
