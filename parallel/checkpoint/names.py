"""Parameter names with and without what wrappers put before them.

``DistributedDataParallel`` and ``DataParallel`` put ``module.`` in front, ``torch.compile`` ``_orig_mod.`` anywhere,
FSDP1 and the checkpoint wrapper their own. A checkpoint has the plain names, so that it loads into any of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

V = TypeVar("V")
_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_LEADING = "module"


def plain_name(name: str) -> str:
    """``module._orig_mod.layer.weight`` becomes ``layer.weight``."""
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while len(parts) > 1 and parts[0] == _LEADING:
        parts.pop(0)
    return ".".join(parts)


def with_plain_names(state: Mapping[str, V]) -> dict[str, V]:
    """A module's state dict under plain names (unchanged where ``module`` is a part of the model itself).

    The versions that torch keeps in the attribute ``_metadata`` go along.
    """
    wrapped = all(_has_wrapper(name) for name in state)
    rename: Callable[[str], str] = plain_name if wrapped else _without_inner_wrappers
    if len({rename(name) for name in state}) != len(state):
        rename = str
    plain: dict[str, V] = OrderedDict((rename(name), value) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        plain._metadata = OrderedDict(_renamed_versions(versions, wrapped))  # type: ignore[attr-defined]
    return plain


def with_names_of(state: Mapping[str, V], wanted: Iterable[str]) -> dict[str, V]:
    """The same state dict under the names that a (wrapped or plain) module has; names it does not have stay."""
    wanted = set(wanted)
    if wanted == set(state):
        return _like(state, {name: name for name in state})
    by_plain_name = {plain_name(name): name for name in wanted}
    if len(by_plain_name) != len(wanted):
        return _like(state, {name: name for name in state})
    return _like(state, {name: by_plain_name.get(plain_name(name), name) for name in state})


def _like(state: Mapping[str, V], names: Mapping[str, str]) -> dict[str, V]:
    renamed: dict[str, V] = OrderedDict((names[name], value) for name, value in state.items())
    if names == {name: name for name in state} and (versions := getattr(state, "_metadata", None)) is not None:
        renamed._metadata = versions  # type: ignore[attr-defined]
    return renamed


def _has_wrapper(name: str) -> bool:
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    return len(parts) > 1 and parts[0] == _LEADING


def _without_inner_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ANYWHERE)


def _renamed_versions(versions: Mapping[str, Any], wrapped: bool) -> Iterable[tuple[str, Any]]:
    for name, version in versions.items():
        parts = [part for part in name.split(".") if part not in _ANYWHERE]
        while wrapped and parts and parts[0] == _LEADING:
            parts.pop(0)
        yield ".".join(parts), version
