"""Which parameters did any rank use? One flag for each, summed over the ranks beside the last buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from ..transport.base import Pending


class UsageFlags:
    """Asked and answered once in a backward.

    Args:
        device: where the flags are summed.
        group: the ranks.
        watch: of the group's transport.
        keep: an answer holds until the next one: the graph is always the same.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup, watch: Callable[[Work], Pending], *, keep: bool
    ) -> None:
        self._device, self._group, self._watch, self._keep = device, group, watch, keep
        self._flags: Tensor | None = None
        self._pending: Pending | None = None
        self._kept: list[bool] | None = None

    def ask(self, used: Sequence[bool]) -> None:
        """Begin to sum what this rank used; all ranks call this in the same place of the order of collectives."""
        self._flags = torch.tensor(used, dtype=torch.int32, device=self._device)
        self._pending = self._watch(dist.all_reduce(self._flags, group=self._group, async_op=True))

    def answer(self) -> list[bool] | None:
        """For each parameter whether any rank used it; ``None`` if nobody asked.

        Raises:
            RuntimeError: the sum failed.
        """
        if self._pending is None or self._flags is None:
            return self._kept
        self._pending.wait()
        used = [users > 0 for users in self._flags.tolist()]
        if self._keep:
            self._kept = used
        return used

    def forget(self) -> None:
        """A new backward begins: nothing was asked in it."""
        self._flags = self._pending = None
