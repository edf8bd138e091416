"""The training library: data parallelism, sharding, data and checkpoints.

Names are imported when they are first used, so that a script pays only for what it takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .naive import NaiveDistributedDataParallel as NaiveDistributedDataParallel

_HOMES = {
    "NaiveDistributedDataParallel": ".naive",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
