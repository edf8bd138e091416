"""Whole parameters for a while, outside of forward and backward: to look at them, or to change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dlaunch.errors import UsageError

from .sharded_parameter import ShardedParameter
from .state import whole_of
from .state_forms import cut
from .unit import Unit


@contextmanager
def summoned(units: Sequence[Unit], *, writeback: bool, rank0_only: bool, offload: bool, grads: bool) -> Iterator[None]:
    """Modules hold whole parameters; all ranks enter and leave together, and run no forward within.

    Args:
        units: whose parameters.
        writeback: changes are kept: each rank those of its rows.
        rank0_only: only the first rank sees whole ones; not with ``writeback``.
        offload: whole ones are in host memory.
        grads: gradients are whole as well, and written back as well.

    Raises:
        UsageError: ``rank0_only`` with ``writeback``.
    """
    if rank0_only and writeback:
        raise UsageError("summon_full_params(rank0_only=True) writes nothing back.", "Pass writeback=False with it.")
    for run in {id(unit.run): unit.run for unit in units}.values():
        run.prepare()
        run.settle()
    shown = [
        (parameter, whole)
        for unit in units
        for parameter in unit.parameters
        if (whole := _whole(parameter, unit, rank0_only, offload, grads)) is not None
    ]
    for parameter, whole in shown:
        for place in parameter.places:
            place.module._parameters[place.name] = whole
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, whole in shown:
                held = parameter.places[0].module._parameters[parameter.places[0].name]
                parameter.show_shard()
                if writeback:
                    _write_back(parameter, whole if held is None else held, grads)


def _whole(
    parameter: ShardedParameter, unit: Unit, rank0_only: bool, offload: bool, grads: bool
) -> nn.Parameter | None:
    shard = parameter.shard
    value = whole_of(shard, parameter, rank0_only=rank0_only)
    gradient = whole_of(shard.grad, parameter, rank0_only=rank0_only) if grads and shard.grad is not None else None
    if value is None:
        return None
    device = torch.device("cpu") if offload else unit.device
    whole = nn.Parameter(value.to(device), requires_grad=shard.requires_grad)
    whole.grad = None if gradient is None else gradient.to(device)
    return whole


def _write_back(parameter: ShardedParameter, whole: nn.Parameter, grads: bool) -> None:
    shard = parameter.shard
    shard.copy_(cut(whole.detach(), parameter))
    if grads and whole.grad is not None:
        shard.grad = cut(whole.grad, parameter).to(shard.device, copy=True)
