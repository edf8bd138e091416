"""Ours under torch's names, for a script that is not changed.

``apply`` is called in the worker before the script runs. Where torch is loaded (a worker forked from the warm
starter) it acts at once, else at the end of the script's first ``import torch``. Scripts, Accelerate and Lightning
then find our classes where they look for torch's. This module itself imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlaunch.ways import VARIABLE, Way, way_named

# Where torch keeps each class, and under what names modules that were loaded before may hold it.
_HOMES = {
    "DistributedDataParallel": ("torch.nn.parallel", "torch.nn.parallel.distributed"),
    "DataParallel": ("torch.nn", "torch.nn.parallel", "torch.nn.parallel.data_parallel"),
}
_ALIASES = {"DistributedDataParallel": ("DistributedDataParallel", "DDP"), "DataParallel": ("DataParallel", "DP")}


def apply(way: str) -> None:
    """Put our classes under torch's names, now or when torch is imported; nothing for ``none``.

    ``dp`` and ``ddp`` both exchange both classes: a script says itself which one it uses.

    Raises:
        UsageError: an unknown way, or one that this version does not have.
    """
    if way_named(way) is Way.NONE:
        return
    if _is_loaded(sys.modules.get("torch")):
        put_in_place()
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


def apply_as_asked() -> None:
    """``apply`` what DLAUNCH_PARALLEL says: what the workers' bootstrap calls before the script."""
    apply(os.environ.get(VARIABLE, Way.NONE.value))


def put_in_place() -> None:
    """Exchange the classes; torch is loaded. A second time changes nothing."""
    from .. import DataParallel, DistributedDataParallel  # noqa: PLC0415  -- they import torch

    for name, ours in (("DistributedDataParallel", DistributedDataParallel), ("DataParallel", DataParallel)):
        theirs = getattr(sys.modules[_HOMES[name][-1]], name)
        if theirs is not ours:
            _stand_in(name, theirs, ours)


def _stand_in(name: str, theirs: Any, ours: Any) -> None:
    if not issubclass(ours, theirs):
        theirs.register(ours)  # torch's DistributedDataParallel is an abstract base class, through Joinable
    for home in _HOMES[name]:
        setattr(sys.modules[home], name, ours)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not _is_ours_or_torchs(module.__name__):
            for alias in _ALIASES[name]:
                if vars(module).get(alias) is theirs:
                    setattr(module, alias, ours)


def _is_ours_or_torchs(name: str) -> bool:
    """torch's own modules keep the class for their checks, which ours passes."""
    return name.partition(".")[0] in {"torch", "dlaunch"}


def _is_loaded(module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


class _AfterTorch(MetaPathFinder):
    """Finds torch as all others would, and exchanges the classes once its import has ended."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader)
        return spec


def _call_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        del loader.exec_module  # the loader is as it was
        put_in_place()

    loader.exec_module = exec_module
