"""What ``state_dict()`` of a sharded module and of its optimizer shows: rows, whole tensors, or DTensors.

`fully_shard` leaves rows. What stands in for torch's classes, or was put into a script that knows nothing of
sharding, shows what that script expects: hooks exchange the values when a state dict is made, and cut them when one is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .sharded_parameter import ShardedParameter, shard_of

if TYPE_CHECKING:
    from .run import Run
    from .unit import Unit


class StateForm(Enum):
    """In which form a state dict holds parameters."""

    ROWS = "this rank's rows"
    WHOLE = "whole tensors on every rank; all ranks make the state dict together"
    DTENSORS = "DTensors that share memory with the rows"


@contextmanager
def shown_as(run: Run, form: StateForm) -> Iterator[None]:
    """State dicts have this form for a while."""
    before, run.form = run.form, form
    try:
        yield
    finally:
        run.form = before


def watch_state_dict(unit: Unit) -> None:
    """Hook the state dicts of a unit's module, both ways."""
    module = unit.module
    module.register_state_dict_pre_hook(_Settle(unit))  # type: ignore[no-untyped-call]
    module._register_state_dict_hook(_Show(unit))  # type: ignore[no-untyped-call]
    # torch before 2.5 has the public name not yet.
    module._register_load_state_dict_pre_hook(_Cut(unit), with_module=True)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_Follow(unit))  # type: ignore[no-untyped-call]


class _Settle:
    """Hook: modules hold rows when a state dict is made that is not to hold them."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        if self._unit.run.form is not StateForm.ROWS:
            self._unit.run.settle()
            self._unit.ensure_memory()


class _Show:
    """Hook: exchange the unit's rows in a state dict that was made."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        form = self._unit.run.form
        if form is StateForm.ROWS:
            return
        for parameter, keys in _keys(self._unit, prefix):
            if present := [key for key in keys if key in state]:
                value = shown(parameter.shard.detach(), parameter, form)
                state.update(dict.fromkeys(present, value))


class _Cut:
    """Hook: whole tensors and DTensors in a state dict that is loaded are cut to this rank's rows."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._unit.run.settle()
        for parameter, keys in _keys(self._unit, prefix):
            for key in keys:
                if key in state:
                    state[key] = cut(state[key], parameter)


class _Follow:
    """Hook: parameters that were exchanged (``assign=True``) are shards at once: an optimizer may be made of them."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        self._unit.follow()


def _keys(unit: Unit, prefix: str) -> Iterator[tuple[ShardedParameter, list[str]]]:
    """Under which keys a state dict has each parameter of the unit."""
    names = {id(module): name for name, module in unit.module.named_modules()}
    for parameter in unit.parameters:
        keys = []
        for place in parameter.places:
            name = names[id(place.module)]
            keys.append(f"{prefix}{name}{'.' if name else ''}{place.name}")
        yield parameter, keys


def shown(rows: Tensor, parameter: ShardedParameter, form: StateForm) -> Any:
    """A parameter's rows, or something of their shape, in a form. For whole tensors a collective."""
    from .state import dtensor_of, whole_of  # noqa: PLC0415  -- it needs what is above

    match form:
        case StateForm.ROWS:
            return rows
        case StateForm.WHOLE:
            whole = whole_of(rows, parameter, rank0_only=False)
            assert whole is not None
            return whole.to(rows.device)
        case StateForm.DTENSORS:
            return dtensor_of(rows, parameter)


def cut(value: Any, parameter: ShardedParameter) -> Any:
    """This rank's rows of a whole tensor or a DTensor; anything else as it is. A collective for some DTensors."""
    if not isinstance(value, Tensor):
        return value
    begin, end = parameter.layout.rows(parameter.rank)
    distributed: Any = value
    if hasattr(distributed, "full_tensor"):
        if _is_cut_alike(distributed, parameter):
            return distributed.to_local()
        value = distributed.full_tensor()
    shape = parameter.layout.shape
    if tuple(value.shape) in (shape, shape or (1,)):
        return (value if value.dim() else value.view(1))[begin:end]
    return value


def _is_cut_alike(value: Any, parameter: ShardedParameter) -> bool:
    placements, mesh = value.placements, value.device_mesh
    return (
        len(placements) == 1
        and placements[0].is_shard(0)
        and mesh.size() == parameter.layout.world_size
        and mesh.get_local_rank() == parameter.rank
    )


# Optimizers


_watching = False


def watch_optimizers() -> None:
    """State dicts of all optimizers follow the form of the model whose rows they hold; twice is the same as once."""
    global _watching  # noqa: PLW0603  -- it is the process that is changed
    if not _watching:
        _watching = True
        exchanged: Any = Optimizer
        exchanged.state_dict = _optimizer_state(Optimizer.state_dict)
        exchanged.load_state_dict = _load_optimizer_state(Optimizer.load_state_dict)


def _optimizer_state(made: Callable[[Optimizer], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    @wraps(made)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        state = made(self)
        held = _shards_by_number(self)
        forms = {number: _form_of(parameter) for number, parameter in held.items()}
        if all(form is StateForm.ROWS for form in forms.values()):
            return state
        states = dict(state["state"])
        for number in sorted(held):  # whole ones are put together by all ranks: in the same order
            if number in states:
                states[number] = _each_rows(states[number], held[number], forms[number])
        return {**state, "state": states}

    return state_dict


def _each_rows(values: Mapping[str, Any], parameter: ShardedParameter, form: StateForm) -> dict[str, Any]:
    shape = parameter.shard.shape
    return {
        key: shown(value, parameter, form) if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in values.items()
    }


def _load_optimizer_state(loads: Callable[[Optimizer, Any], None]) -> Callable[[Optimizer, Any], None]:
    @wraps(loads)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        held = _shards_by_number(self)
        if held and isinstance(state_dict, Mapping) and "state" in state_dict:
            numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
            places = {number: held[place] for place, number in enumerate(numbers) if place in held}
            states = {
                number: cut_state(values, places[number]) if number in places else values
                for number, values in state_dict["state"].items()
            }
            state_dict = {**state_dict, "state": states}
        loads(self, state_dict)

    return load_state_dict


def cut_state(values: Mapping[str, Any], parameter: ShardedParameter | None) -> dict[str, Any]:
    """This rank's rows, copied: an optimizer changes its state in place, and what is loaded may be shared."""
    return {key: _cut_value(key, value, parameter) for key, value in values.items()}


def _cut_value(key: str, value: Any, parameter: ShardedParameter | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if parameter is None or key == "step":  # a count, which has the shape of a parameter without dimensions
        return value.clone()
    rows: Tensor = cut(value, parameter)
    return rows.clone()


def _shards_by_number(optimizer: Optimizer) -> dict[int, ShardedParameter]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = {number: shard_of(parameter) for number, parameter in enumerate(parameters)}
    return {number: parameter for number, parameter in found.items() if parameter is not None}


def _form_of(parameter: ShardedParameter) -> StateForm:
    unit = parameter.unit()
    return StateForm.ROWS if unit is None else unit.run.form


def dtensor_like(rows: Tensor, shape: tuple[int, ...], mesh: Any) -> Any:
    """Rows as a DTensor of a whole shape, cut on dimension 0, in the same memory."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  -- slow to import, seldom needed

    size = torch.Size(shape or (1,))
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
