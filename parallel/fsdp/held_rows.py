"""What a rank holds of a model and its optimizer: rows under names, listed alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .run import Run
from .sharded_parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class Key:
    """A parameter's value (``of`` is empty), or a tensor of its optimizer state."""

    parameter: str
    of: str
    dtype: str


def parameters_of(run: Run) -> dict[str, ShardedParameter]:
    """All sharded parameters of a run by name."""
    return {parameter.name: parameter for unit in run.units for parameter in unit.parameters}


def held_rows(run: Run, optimizer: Optimizer | None) -> dict[Key, Tensor]:
    """This rank's rows: of each parameter, and of what in the optimizer's state has its shape."""
    found: dict[Key, Tensor] = {}
    for name, parameter in parameters_of(run).items():
        found[_key(name, "", parameter.shard)] = parameter.shard.detach()
        for state_key, value in _state(optimizer, parameter):
            if _is_rows(value, parameter):
                found[_key(name, state_key, value)] = value
    return found


class HeldValues(NamedTuple):
    """What an optimizer holds besides rows; the same on all ranks, and such as JSON can carry.

    A value is ``[value, data type of a tensor or None]``.
    """

    states: Mapping[str, Mapping[str, list[Any]]]  # by parameter and key: the count of steps, for instance
    groups: list[dict[str, list[Any]]]  # options of each group of parameters: the learning rate, for instance


def held_values(run: Run, optimizer: Optimizer | None) -> HeldValues:
    """All of the optimizer's numbers.

    Raises:
        RuntimeError: its state has a tensor that is neither rows nor a number.
    """
    states: dict[str, dict[str, list[Any]]] = {}
    for name, parameter in parameters_of(run).items():
        for state_key, value in _state(optimizer, parameter):
            if not _is_rows(value, parameter):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise RuntimeError(
                        f"The optimizer's state {state_key!r} of {name} has the shape {tuple(value.shape)}: neither a "
                        "number nor this rank's rows, so another world has no use for it: load a checkpoint."
                    )
                states.setdefault(name, {})[state_key] = _plain(value)
    groups = optimizer.param_groups if optimizer is not None else []
    return HeldValues(states, [_options(group) for group in groups])


def restore_values(run: Run, optimizer: Optimizer, values: HeldValues) -> None:
    """Give an optimizer the numbers that `held_values` found.

    Raises:
        ValueError: it has another number of groups of parameters.
    """
    for name, parameter in parameters_of(run).items():
        for key, plain in values.states.get(name, {}).items():
            optimizer.state[parameter.shard][key] = _restored(plain, parameter.shard.device)
    if len(values.groups) != len(optimizer.param_groups):
        raise ValueError(
            f"this rank's optimizer has {len(optimizer.param_groups)} groups of parameters, and that of the others "
            f"{len(values.groups)}: make it as they did"
        )
    for group, options in zip(optimizer.param_groups, values.groups, strict=True):
        for key, plain in options.items():
            value = _restored(plain, torch.device("cpu"))
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _options(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What JSON can carry of a group's options; the rest is the script's to make alike."""
    return {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> list[Any]:
    """With its data type if it is a tensor, and whether that was on an accelerator, where some optimizers want it."""
    if isinstance(value, Tensor):
        return [value.item(), str(value.dtype), value.device.type != "cpu"]
    return [value, None]


def _restored(plain: list[Any], device: torch.device) -> Any:
    value, dtype, *on_device = plain
    if dtype is None:
        return value
    return torch.tensor(value, dtype=dtype_named(dtype), device=device if any(on_device) else "cpu")


def dtype_named(text: str) -> torch.dtype:
    """``"torch.float32"`` to the data type."""
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype


def _state(optimizer: Optimizer | None, parameter: ShardedParameter) -> Iterator[tuple[str, Any]]:
    state = optimizer.state.get(parameter.shard, {}) if optimizer is not None else {}
    return iter(sorted(state.items()))


def _is_rows(value: Any, parameter: ShardedParameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shard.shape


def _key(name: str, of: str, tensor: Tensor) -> Key:
    return Key(name, of, str(tensor.dtype))
