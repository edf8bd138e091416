"""The sum of sparse gradients over the ranks: everyone's rows are gathered, and added where they meet.

Not ``all_reduce`` of sparse tensors: over gloo that of torch 2.13 ends the process now and then (a segmentation fault
in a thread of the group) when other collectives are under way, with torch's own DistributedDataParallel too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from ..transport.base import Pending

_INDEX_BYTES = 8


class SparseSum:
    """A sum under way. How many rows each rank has is asked at once; the rows follow when the sum is waited for.

    Args:
        gradient: coalesced; of the same shape and type on all ranks, with any number of rows.
        group: the ranks.
        watch: of the group's transport.
    """

    def __init__(self, gradient: Tensor, group: dist.ProcessGroup, watch: Callable[[Work], Pending]) -> None:
        self._gradient, self._group, self._watch = gradient, group, watch
        count = torch.tensor([gradient._nnz()], device=gradient.device)
        self._counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
        self._counting = watch(dist.all_gather(self._counts, count, group=group, async_op=True))

    def wait(self) -> Tensor:
        """The sum, coalesced."""
        self._counting.wait()
        counts = [int(count.item()) for count in self._counts]
        gradient = self._gradient
        if not any(counts):
            return gradient
        mine = _rows(gradient, max(counts))
        everyone = [torch.empty_like(mine) for _ in counts]
        self._watch(dist.all_gather(everyone, mine, group=self._group, async_op=True)).wait()
        rows = torch.cat([rows[:count] for rows, count in zip(everyone, counts, strict=True)])
        split = gradient.sparse_dim() * _INDEX_BYTES
        indices = _packed(rows[:, :split]).view(torch.int64).view(-1, gradient.sparse_dim()).t()
        values = _packed(rows[:, split:]).view(gradient.dtype).view(-1, *gradient.shape[gradient.sparse_dim() :])
        return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False).coalesce()


def _rows(gradient: Tensor, count: int) -> Tensor:
    """Indices and values as bytes, a row for each; as many rows as the rank with most has."""
    present, sparse_dim = gradient._nnz(), gradient.sparse_dim()
    width = sparse_dim * _INDEX_BYTES + gradient.shape[sparse_dim:].numel() * gradient.element_size()
    rows = torch.zeros(count, width, dtype=torch.uint8, device=gradient.device)
    if present:
        parts = (gradient.indices().t(), gradient.values())
        as_bytes = [_packed(part).view(torch.uint8).view(present, -1) for part in parts]
        rows[:present] = torch.cat(as_bytes, dim=1)
    return rows


def _packed(tensor: Tensor) -> Tensor:
    """A flat copy that begins its own storage: ``contiguous`` leaves a single row its strides and its offset."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten()
