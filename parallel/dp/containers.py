"""Opening the containers that tensors come in: one level at a time, and putting a copy together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Opened:
    """A container's children, how each is reached from it, and how to make one like it of other children."""

    children: tuple[Any, ...]
    keys: tuple[Hashable, ...]
    names: tuple[str, ...]  # "[0]", "['loss']", ".loss": for messages
    rebuild: Callable[[Sequence[Any]], Any]


def opened(value: Any) -> Opened | None:
    """A tuple, namedtuple, list, dict or dataclass (subclasses too) opened; ``None`` for all else."""
    if isinstance(value, dict):
        return _of_keys(value, tuple(value))
    if isinstance(value, list):
        return _of_positions(value, lambda children: _list_like(value, children))
    if isinstance(value, tuple):
        return _of_tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_fields(value, tuple(field.name for field in dataclasses.fields(value)))
    return None


def _of_keys(value: dict[Any, Any], keys: tuple[Any, ...]) -> Opened:
    def rebuild(children: Sequence[Any]) -> dict[Any, Any]:
        like = copy.copy(value)  # keeps a default factory, and what else a subclass holds
        for key, child in zip(keys, children, strict=True):
            like[key] = child
        return like

    return Opened(tuple(value.values()), keys, tuple(f"[{key!r}]" for key in keys), rebuild)


def _of_positions(value: Sequence[Any], rebuild: Callable[[Sequence[Any]], Any]) -> Opened:
    positions = tuple(range(len(value)))
    return Opened(tuple(value), positions, tuple(f"[{position}]" for position in positions), rebuild)


def _list_like(value: list[Any], children: Sequence[Any]) -> list[Any]:
    like = copy.copy(value)
    like[:] = children
    return like


def _of_tuple(value: tuple[Any, ...]) -> Opened:
    make = getattr(type(value), "_make", None)
    if make is None:
        return _of_positions(value, type(value))
    names = tuple(f".{name}" for name in type(value)._fields)  # type: ignore[attr-defined]
    return Opened(tuple(value), tuple(range(len(value))), names, make)


def _of_fields(value: Any, names: tuple[str, ...]) -> Opened:
    def rebuild(children: Sequence[Any]) -> Any:
        like = copy.copy(value)  # neither __init__ nor __post_init__ runs again
        for name, child in zip(names, children, strict=True):
            object.__setattr__(like, name, child)  # frozen ones too
        return like

    return Opened(tuple(getattr(value, name) for name in names), names, tuple(f".{name}" for name in names), rebuild)
