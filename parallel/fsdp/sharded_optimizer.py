"""ZeRO stage 1 (Rajbhandari et al., 2020): parameters are whole everywhere, each rank steps on some of them.

For plain DistributedDataParallel: gradients are averaged as ever, the optimizer's state is 1/N on each rank, and after
a step each rank sends the parameters that it stepped on to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ddp.broadcast import broadcast_coalesced


def owners_of(numels: Sequence[int], world_size: int) -> list[int]:
    """Which rank steps on each parameter: the largest first, each to the rank that has least. Pure."""
    loads = [0] * world_size
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(world_size), key=loads.__getitem__)
        loads[owners[index]] += numels[index]
    return owners


class ShardedOptimizer:
    """An optimizer whose state is cut over the ranks by parameters.

    Args:
        parameters: the same on all ranks, with gradients that were averaged.
        optimizer_class: of torch, or alike: called with this rank's parameters and ``defaults``.
        process_group: the ranks; the default group if ``None``.
        defaults: the optimizer's options.

    Attributes:
        optimizer: this rank's own; a scheduler takes it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        group = process_group or dist.group.WORLD
        assert group is not None, "the default process group is not initialized"
        self._group, self._rank = group, dist.get_rank(group)
        self._parameters = list(parameters)
        self._owners = owners_of([p.numel() for p in self._parameters], dist.get_world_size(group))
        own = [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner == self._rank]
        # An optimizer refuses an empty list; a rank may have nothing when there are more ranks than parameters.
        self.optimizer = optimizer_class(own or [torch.zeros(0, requires_grad=True)], **defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of this rank's optimizer, for learning rates and the like; change them on all ranks."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Step on this rank's parameters and get the others'; all ranks call this together."""
        self.optimizer.step()
        for owner in sorted(set(self._owners)):
            mine = [p.detach() for p, other in zip(self._parameters, self._owners, strict=True) if other == owner]
            broadcast_coalesced(mine, owner, self._group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, not only of this rank's."""
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: save it with ``sharded=`` of ``dlaunch.checkpoint``; it fits the same world size only."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what this rank saved."""
        self.optimizer.load_state_dict(state)
