"""A module inside a unit that is called while the unit is sharded would compute with a few rows: it says so instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .unit import State, Unit


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
