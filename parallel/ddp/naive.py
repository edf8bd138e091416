"""Data parallelism in its simplest form: one all_reduce for each parameter, after the backward.

It is slow on purpose: nothing overlaps. It is what the fast class must agree with (the test oracle), and where a
reader should start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_group


class NaiveDistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks when ``backward()`` returns.

    Every rank must hold the same parameters in the same order and run as many backwards as the others. A parameter
    that no rank used keeps its gradient as it was; one that only some ranks used counts as zero on the rest.

    Args:
        module: the model; its parameters and buffers become those of the group's first rank.
        process_group: the ranks that train together; the default group if ``None``.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group if process_group is not None else _get_default_group()
        self.require_backward_grad_sync = True
        self._averaging_queued = False
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=dist.get_global_rank(self.process_group, 0), group=self.process_group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue_averaging)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module itself."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; the next backward outside averages their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _queue_averaging(self, _: Tensor) -> None:
        """Ask autograd, once in a backward, to call us when the last gradient is there."""
        if self.require_backward_grad_sync and not self._averaging_queued:
            self._averaging_queued = True
            Variable._execution_engine.queue_callback(self._average_gradients)

    def _average_gradients(self) -> None:
        self._averaging_queued = False
        world_size = dist.get_world_size(self.process_group)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(parameters[0].device)
        dist.all_reduce(used, group=self.process_group)
        for parameter, users in zip(parameters, used.tolist(), strict=True):
            if users:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad.div_(world_size), group=self.process_group)
