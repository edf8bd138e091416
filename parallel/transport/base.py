"""How a flat bucket is summed over the ranks: a small interface, and its form over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveFailed(RuntimeError):
    """A reduction did not finish: a peer died, the network broke or the time was up.

    Parameters are as they were before the backward; its gradients are invalid and were dropped.
    """


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> object:
        """Return when the sum is in place; raise if it never will be."""


class Transport(Protocol):
    """Sums flat buffers over the ranks of one group. All ranks must start the same reductions in the same order."""

    name: str

    def allocate(self, specs: Sequence[tuple[int, torch.dtype, torch.device]]) -> list[Tensor]:
        """Zeroed buffers that this transport reduces fastest, of shapes ``(numel,)``; all ranks call it together."""

    def all_reduce(self, flat: Tensor) -> Pending:
        """Begin to replace ``flat`` by its sum over the ranks. Returns at once."""

    def give_up(self) -> None:
        """Let the others know, where that is possible, that this rank will not take part any more."""

    def close(self) -> None:
        """Give back what the transport holds. Buffers that it allocated stay valid."""


class TorchTransport:
    """The process group's own all_reduce (gloo, NCCL, ...)."""

    name = "torch"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, specs: Sequence[tuple[int, torch.dtype, torch.device]]) -> list[Tensor]:
        """Plain memory: every backend takes it."""
        return [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype, device in specs]

    def all_reduce(self, flat: Tensor) -> Pending:
        """Begin; the handle is torch's ``Work``."""
        work: Pending = dist.all_reduce(flat, group=self._group, async_op=True)
        return work

    def give_up(self) -> None:
        """Backends have no word for it: the others notice when this process ends, or when their time is up."""

    def close(self) -> None:
        """Nothing is held: the group belongs to the user."""
