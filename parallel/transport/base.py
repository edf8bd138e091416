"""How a flat bucket is summed over the ranks: a small interface, and its form over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from .give_up import GiveUpMarks, WatchedWork


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

    def watch(self, work: Work) -> Pending:
        """A collective of the group whose waiters notice, where that is possible, that another rank gave up."""

    def close(self) -> None:
        """Give back what the transport holds. Buffers that it allocated stay valid."""


def is_gloo_on_cpus(group: dist.ProcessGroup) -> bool:
    """Whether gloo moves the group's tensors on CPUs; a group made without a backend's name has one for each device."""
    by_device = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
    return by_device.get("cpu") == "gloo"


class TorchTransport:
    """The process group's own all_reduce (gloo, NCCL, ...).

    Args:
        group: the ranks.
        on_cpus: whether all tensors are on CPUs: only there waiting may be cut into pieces.
    """

    name = "torch"

    def __init__(self, group: dist.ProcessGroup, on_cpus: bool = True) -> None:
        self._group = group
        self._marks = GiveUpMarks(group) if on_cpus and is_gloo_on_cpus(group) else None

    def allocate(self, specs: Sequence[tuple[int, torch.dtype, torch.device]]) -> list[Tensor]:
        """Plain memory: every backend takes it."""
        return [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype, device in specs]

    def all_reduce(self, flat: Tensor) -> Pending:
        """Begin; the handle is torch's ``Work``."""
        return self.watch(dist.all_reduce(flat, group=self._group, async_op=True))

    def watch(self, work: Work) -> Pending:
        """Over gloo a mark in the group's store is looked for; elsewhere waiting is the backend's own affair."""
        return work if self._marks is None else WatchedWork(work, self._marks)

    def give_up(self) -> None:
        """Over gloo leave a mark; with another backend the others notice when this process ends or time is up."""
        if self._marks is not None:
            self._marks.leave()

    def close(self) -> None:
        """Nothing is held: the group belongs to the user."""
