"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .sharded_parameter import ShardedParameter, all_shards, shard_of


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``; all ranks call it together.

    The same as ``torch.nn.utils.clip_grad_norm_`` does once something is sharded. A parameter that is replicated counts
    once, and so does a tied one.

    Returns:
        The norm before scaling, without dimensions; the same bits on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is true.
    """
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def with_norms_of_all_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's function for the norm of some tensors, which sees when they are gradients of rows."""

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        owners = {id(shard.shard.grad): shard for shard in all_shards() if shard.shard.grad is not None}
        if not any(id(gradient) in owners for gradient in gradients):
            return original(gradients, norm_type, error_if_nonfinite, foreach)
        total = norm_over_ranks(gradients, owners, float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return total

    return total_norm


def clipping_with_norms_of_all_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``clip_grad_norm_`` of a torch that computes norms in the midst of it (before 2.6), for rows as well."""
    total_norm = with_norms_of_all_ranks(original)

    @wraps(original)
    def clips(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if all(shard_of(parameter) is None for parameter in held):
            return original(held, max_norm, norm_type, error_if_nonfinite, foreach)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        total = total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return total

    return clips


def norm_over_ranks(gradients: list[Tensor], owners: dict[int, ShardedParameter], norm_type: float) -> Tensor:
    """Powers of local norms in float64, summed over each group of ranks; the maximum for the infinite norm.

    Args:
        gradients: some of them rows.
        owners: the sharded parameter of a gradient, by its ``id``.
        norm_type: order of the norm.
    """
    device = gradients[0].device
    local = torch.zeros((), dtype=torch.float64, device=device)
    by_group: dict[int, tuple[dist.ProcessGroup, torch.device, list[Tensor]]] = {}
    replicated = []
    for gradient in gradients:
        unit = owner.unit() if (owner := owners.get(id(gradient))) is not None else None
        group = unit.transport.group if unit is not None else None
        if unit is None or group is None:
            replicated.append(gradient)
        else:
            by_group.setdefault(id(group), (group, unit.device, []))[2].append(gradient)
    powers = [_power_sum(replicated, norm_type, device)] if replicated else [local]
    for group, on_device, shards in by_group.values():
        power = _power_sum(shards, norm_type, on_device)
        dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group)
        powers.append(power.to(device))
    stacked = torch.stack(powers)
    total = stacked.max() if math.isinf(norm_type) else stacked.sum().pow(1.0 / norm_type)
    return total.to(gradients[0].dtype)


def _power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(present, norm_type)
    stacked = torch.stack([norm.to(device=device, dtype=torch.float64) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()
