"""Optimizer state of a sharded model under the parameters' names: whole, or each rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.shards import shard
from .fully_shard import run_of
from .sharded_parameter import ShardedParameter, shard_of
from .state import dtensor_of, whole_of
from .state_forms import cut_state

_Convert = Callable[[Tensor, ShardedParameter], Any]


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
    """The optimizer's state as if nothing were sharded; all ranks call this together.

    Returns:
        ``{"state": {parameter's name: {...}}, "param_groups": [{"params": [names], ...}]}``, tensors in host memory;
        the states are empty on other ranks than the first if ``rank0_only``.
    """
    state = _named(model, optimizer, lambda rows, parameter: whole_of(rows, parameter, rank0_only=rank0_only))
    run = run_of(model)
    if rank0_only and not run.units[-1].is_first:
        state["state"] = {}
    return state


def sharded_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part, for ``sharded=`` of ``dlaunch.checkpoint``."""
    return _named(
        model,
        optimizer,
        lambda rows, parameter: shard(rows, parameter.layout.rows(parameter.rank)[0], parameter.layout.shape or (1,)),
    )


def dtensor_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part as DTensors, for ``torch.distributed.checkpoint``."""
    return _named(model, optimizer, dtensor_of)


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take over what `full_optimizer_state_dict` gave, in a world of any size; each rank has all of ``state``.

    Raises:
        KeyError: the optimizer holds a parameter that ``state`` does not know.
    """
    optimizer.load_state_dict(optimizer_state_to_load(model, optimizer, state))


def optimizer_state_to_load(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's rows of a state under names, whole or as DTensors, as ``optimizer.load_state_dict`` takes it."""
    names = _names(model)
    numbers: dict[str, int] = {}
    groups = []
    known = {name for group in state["param_groups"] for name in group["params"]}
    options = {name: group for group in state["param_groups"] for name in group["params"]}
    states: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        indices = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in known:
                raise KeyError(f"the optimizer's state has nothing about {name}")
            numbers[name] = len(numbers)
            indices.append(numbers[name])
            if name in state["state"]:
                states[numbers[name]] = cut_state(state["state"][name], shard_of(parameter))
        saved = options[names[id(group["params"][0])]] if group["params"] else group
        groups.append({**{key: value for key, value in saved.items() if key != "params"}, "params": indices})
    return {"state": states, "param_groups": groups}


def _named(model: nn.Module, optimizer: Optimizer, convert: _Convert) -> dict[str, Any]:
    run_of(model).settle()
    names = _names(model)
    states: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                states[names[id(parameter)]] = _converted(optimizer.state[parameter], shard_of(parameter), convert)
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": states, "param_groups": groups}


def _converted(state: Mapping[str, Any], parameter: ShardedParameter | None, convert: _Convert) -> dict[str, Any]:
    if parameter is None:
        return dict(state)
    shape = torch.Size(parameter.layout.shard_shape(parameter.rank))
    return {
        key: _copied(value) if not isinstance(value, Tensor) or value.shape != shape else convert(value, parameter)
        for key, value in state.items()
    }


def _copied(value: Any) -> Any:
    """The count of steps, and the like: the optimizer goes on changing its own."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
