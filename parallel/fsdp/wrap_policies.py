"""Which modules become units: by class, by size, by a function. torch's own policies have the same form and work too.

A policy is called with ``module``, ``recurse`` and ``nonwrapped_numel`` (elements that no inner unit has).
With ``recurse=True`` it says whether to look inside, with ``recurse=False`` whether the module itself becomes a unit.
"""

from __future__ import annotations

from collections import Counter
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


def repeated_blocks(root: nn.Module, min_numel: int = 2**15) -> list[nn.Module]:
    """What becomes units where nothing was chosen: a model's repeated blocks, outermost first.

    Blocks are items of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with another item of the same class. Small
    ones are left to the root: a gather costs more than they are worth.

    Args:
        root: the model.
        min_numel: elements that a block has at least.
    """
    found: list[nn.Module] = []
    _find_blocks(root, min_numel, found)
    return list(dict.fromkeys(found))


def _find_blocks(module: nn.Module, min_numel: int, found: list[nn.Module]) -> None:
    children = list(module.children())
    kinds = Counter(type(child) for child in children)
    listed = isinstance(module, (*_CONTAINERS, nn.Sequential))
    for child in children:
        large = sum(parameter.numel() for parameter in child.parameters()) >= min_numel
        if large and listed and kinds[type(child)] > 1 and not isinstance(child, _CONTAINERS):
            found.append(child)
        elif large:
            _find_blocks(child, min_numel, found)


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
