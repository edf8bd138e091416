"""Putting the replicas' outputs together on one device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .containers import Opened, opened


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """One output of the replicas' outputs, in their order.

    Tensors are concatenated along ``dim``; those without dimensions become a vector with one entry for each replica.
    Containers are rebuilt around the results. What is no tensor must be equal in all replicas. Gradients flow back
    to each replica.

    Raises:
        ValueError: the replicas' containers differ in length or keys, or their plain values differ.
        TypeError: the replicas returned different types in one place.
    """
    return _gathered(list(outputs), device, dim, "the output")


def _gathered(outputs: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return _concatenated(_all_tensors(outputs, where), device, dim)
    types = {type(output) for output in outputs}
    if len(types) > 1:
        raise TypeError(f"the replicas returned {_names(types)} at {where}")
    if (container := opened(first)) is None:
        return _agreed(outputs, where)
    others = [_like(container, opened(output), where) for output in outputs]
    return container.rebuild(
        [
            _gathered([other[key] for other in others], device, dim, where + name)
            for key, name in zip(container.keys, container.names, strict=True)
        ]
    )


def _all_tensors(outputs: list[Any], where: str) -> list[Tensor]:
    if not all(isinstance(output, Tensor) for output in outputs):
        raise TypeError(f"the replicas returned {_names({type(output) for output in outputs})} at {where}")
    return outputs


def _concatenated(tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    here = [tensor.to(device) for tensor in tensors]
    if any(tensor.dim() for tensor in here):
        return torch.cat(here, dim)
    warnings.warn(
        "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and return "
        "a vector.",  # torch's own words, which scripts filter for
        stacklevel=4,
    )
    return torch.stack(here)


def _like(first: Opened, other: Opened | None, where: str) -> dict[Any, Any]:
    if other is None or set(other.keys) != set(first.keys):
        found = () if other is None else other.keys
        raise ValueError(f"the replicas returned different keys at {where}: {list(first.keys)} and {list(found)}")
    return dict(zip(other.keys, other.children, strict=True))


def _agreed(outputs: list[Any], where: str) -> Any:
    first = outputs[0]
    if all(output is first or bool(output == first) for output in outputs):
        return first
    raise ValueError(f"the replicas returned different values at {where}: {outputs}; return tensors to get them all")


def _names(types: set[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in types))
