"""What a rank holds of a model and its optimizer: rows under names, listed alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


def held_values(run: Run, optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    """The rest of the optimizer's state, which is the same on all ranks: numbers, such as the count of steps.

    Returns:
        By parameter and key ``[value, data type of a tensor or None]``, which JSON can carry.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters_of(run).items():
        for state_key, value in _state(optimizer, parameter):
            if not _is_rows(value, parameter):
                plain = [value.item(), str(value.dtype)] if isinstance(value, Tensor) else [value, None]
                found.setdefault(name, {})[state_key] = plain
    return found


def restored_value(plain: list[Any]) -> Any:
    """The value that `held_values` made plain."""
    value, dtype = plain
    return value if dtype is None else torch.tensor(value, dtype=dtype_named(dtype))


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
