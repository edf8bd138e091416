"""Which modules become units: by class, by size, by a function. torch's own policies have the same form and work too.

A policy is called with ``module``, ``recurse`` and ``nonwrapped_numel`` (elements that no inner unit has).
With ``recurse=True`` it says whether to look inside, with ``recurse=False`` whether the module itself becomes a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called


class WrapPolicy(Protocol):
    """See the module's text."""

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Look inside, or make it a unit."""


def by_class(classes: Iterable[type[nn.Module]]) -> WrapPolicy:
    """Units are the modules of these classes: a model's blocks, usually."""
    kinds = tuple(classes)

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, kinds)

    return policy


def by_size(min_num_params: int) -> WrapPolicy:
    """Units have at least so many elements that no inner unit has."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        large = nonwrapped_numel >= min_num_params
        return large and (recurse or not isinstance(module, _CONTAINERS))

    return policy


def by_function(function: Callable[[nn.Module], bool]) -> WrapPolicy:
    """Units are the modules for which ``function(module)`` is true."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or function(module)

    return policy


def modules_to_shard(root: nn.Module, policy: WrapPolicy) -> list[nn.Module]:
    """What the policy makes units below ``root``, inner ones first; ``root`` itself is not asked about."""
    found: list[nn.Module] = []
    for child in root.children():
        _visit(child, policy, found)
    return list(dict.fromkeys(found))


def _visit(module: nn.Module, policy: WrapPolicy, found: list[nn.Module]) -> int:
    """Elements that units take out of ``module``."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(_visit(child, policy, found) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        found.append(module)
        return numel
    return taken
