"""Rows that are taken for the whole: whoever uses them so is told which parameter it is, and of which unit.

A module inside a unit that is called while the unit is sharded is seen by a hook, always. A function that is given a
parameter of a unit that is not at work (``linear(x, model.other.weight)``) is seen by `RowsInUse`, which looks at every
function of torch and therefore only at the first forward that a backward may follow. Outside of the root's forward
nobody looks: there, rows are this rank's rows, and functions of them are nothing unusual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .sharded_parameter import ShardedParameter, shard_of, sharded_before, whole_of_sharded
from .unit import State, Unit

# Functions that ask a tensor about itself, or make one of its type and place.
_ASKS_ONLY = frozenset(
    (
        *("__get__", "__set__", "__len__", "__hash__", "__repr__", "size", "stride", "dim", "ndimension", "numel"),
        *("nelement", "element_size", "get_device", "data_ptr", "storage_offset", "untyped_storage", "is_contiguous"),
        *("is_floating_point", "is_complex", "requires_grad_", "register_hook"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    )
)
_ASKS_THE_OTHER = frozenset(("to", "type_as"))  # of the second tensor the same


def guard_inner_modules(unit: Unit) -> None:
    """Hook every module, except the unit's own, that directly holds a parameter of the unit."""
    holders = {id(place.module): place.module for parameter in unit.parameters for place in parameter.places}
    for holder in holders.values():
        if holder is not unit.module:
            holder.register_forward_pre_hook(_Guard(unit, holder), prepend=True)


class _Guard:
    def __init__(self, unit: Unit, holder: nn.Module) -> None:
        self._unit, self._holder = unit, holder

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._unit.state is State.WHOLE:
            return
        names = [p.name for p in self._unit.parameters if any(place.module is self._holder for place in p.places)]
        if not names:
            return
        raise RuntimeError(
            f"{', '.join(names)} is sharded: this {type(module).__name__} ran outside of the forward of its unit "
            f"{self._unit.name}, and would take this rank's rows for the whole. Call the unit's module, make this "
            "one a unit with fully_shard, or call unshard() on the unit's module first."
        )


class RowsInUse(TorchFunctionMode):
    """While it is entered, a function of torch that is given rows, or what is whole no more, raises RuntimeError."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments, and do what was asked for."""
        name = getattr(function, "__name__", "a function")
        if not torch.compiler.is_compiling() and name not in _ASKS_ONLY:
            looked_at = args[:1] if name in _ASKS_THE_OTHER else (*args, *(kwargs or {}).values())
            for parameter in _parameters_in(looked_at):
                _check(parameter, name)
        return function(*args, **(kwargs or {}))


def is_compiled(root: nn.Module) -> bool:
    """Whether a module below is compiled: what is looked at would be compiled once more for the next forward."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or type(module).__name__ == "OptimizedModule"
        for module in root.modules()
    )


def _parameters_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters_in(value)


def _check(parameter: Tensor, function: str) -> None:
    if (sharded := shard_of(parameter)) is not None:
        begin, end = sharded.layout.rows(sharded.rank)
        what = f"which has only rows {begin} to {end} of {sharded.layout.total_rows} on rank {sharded.rank}"
        cure = "Run it in the forward of that unit, make both modules one unit, or call unshard() on the unit's module."
    elif (sharded := sharded_before(parameter)) is not None:
        what = "as it was before fully_shard: no optimizer changes this tensor any more"
        cure = "Take the parameter from its module at each use, rather than keep it."
    elif (sharded := whole_of_sharded(parameter)) is not None and not _is_whole(sharded):
        what = "whole no more: its memory was freed after the forward of its unit"
        cure = "Take the parameter from its module at each use, rather than keep it."
    else:
        return
    unit = sharded.unit()
    where = "" if unit is None else f" of unit {unit.name}"
    raise RuntimeError(f"{function}() was given {sharded.name}{where}, {what}. {cure}")


def _is_whole(sharded: ShardedParameter) -> bool:
    unit = sharded.unit()
    return unit is None or unit.state is State.WHOLE
