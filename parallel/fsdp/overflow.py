"""Whether a scaled gradient overflowed, on any rank: what ``GradScaler`` must know when each rank has a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .sharded_parameter import shard_of

_Unscale = Callable[..., dict[torch.device, Tensor]]


def with_overflows_of_all_ranks(original: _Unscale) -> _Unscale:
    """``GradScaler._unscale_grads_`` (torch 2.13, amp/grad_scaler.py), which sees when the optimizer holds rows."""

    @wraps(original)
    def unscale_grads(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        groups = _groups_of(optimizer)
        if not groups:
            return found
        overflows = torch.stack([overflow.to("cpu") for overflow in found.values()] or [torch.zeros(())]).max()
        for group, device in groups:
            on_device = overflows.to(device)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group)
            overflows = on_device.to("cpu")
        for overflow in found.values():
            overflow.copy_(overflows)
        return found or {found_inf.device: found_inf.copy_(overflows)}

    return unscale_grads


def _groups_of(optimizer: Optimizer) -> list[tuple[dist.ProcessGroup, torch.device]]:
    """Those over which the optimizer's parameters are cut, in the order of parameters."""
    found: dict[int, tuple[dist.ProcessGroup, torch.device]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = shard_of(parameter)
        unit = shard.unit() if shard is not None else None
        if unit is not None and unit.transport.group is not None:
            found.setdefault(id(unit.transport.group), (unit.transport.group, unit.device))
    return list(found.values())
