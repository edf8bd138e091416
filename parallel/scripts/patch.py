"""Ours under torch's names, for a script that is not changed.

``apply`` is called in the worker before the script runs. Where torch is loaded (a worker forked from the warm
starter) it acts at once, else at the end of the script's first ``import torch``. Scripts, Accelerate and Lightning
then find our classes where they look for torch's. This module itself imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlaunch.ways import VARIABLE, Way, way_named

# Where torch keeps each name; the last place is the one that defines it, or stands for that.
_HOMES = {
    "DistributedDataParallel": ("torch.nn.parallel", "torch.nn.parallel.distributed"),
    "DataParallel": ("torch.nn", "torch.nn.parallel", "torch.nn.parallel.data_parallel"),
}
_COMPOSABLE = ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")
_FSDP_HOMES = {
    "FullyShardedDataParallel": ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel"),
    "fully_shard": (*_COMPOSABLE, "torch.distributed.fsdp"),
    "FSDPModule": (*_COMPOSABLE, "torch.distributed.fsdp"),
    "register_fsdp_forward_method": (*_COMPOSABLE, "torch.distributed.fsdp"),
    "share_comm_ctx": ("torch.distributed.fsdp",),
}
# Under what other names modules that were loaded before may hold them.
_ALIASES = {"DistributedDataParallel": "DDP", "DataParallel": "DP", "FullyShardedDataParallel": "FSDP"}


def apply(way: str) -> None:
    """Put our classes under torch's names, now or when torch is imported; nothing for ``none``.

    ``dp`` and ``ddp`` both exchange both classes: a script says itself which one it uses. ``fsdp`` exchanges torch's
    FSDP1 and FSDP2 as well.

    Raises:
        UsageError: an unknown way.
    """
    chosen = way_named(way)
    if chosen is Way.NONE:
        return
    if _is_loaded(sys.modules.get("torch")):
        put_in_place(chosen)
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch(chosen))


def apply_as_asked() -> None:
    """``apply`` what DLAUNCH_PARALLEL says: what the workers' bootstrap calls before the script."""
    apply(os.environ.get(VARIABLE, Way.NONE.value))


def put_in_place(way: Way = Way.DDP) -> None:
    """Exchange the classes; torch is loaded. A second time changes nothing."""
    from .. import DataParallel, DistributedDataParallel  # noqa: PLC0415  -- they import torch
    from . import spawned  # noqa: PLC0415  -- it imports multiprocessing, which torch has loaded by now

    for name, ours in (("DistributedDataParallel", DistributedDataParallel), ("DataParallel", DataParallel)):
        theirs = getattr(sys.modules[_HOMES[name][-1]], name)
        if theirs is not ours:
            if not issubclass(ours, theirs):
                theirs.register(ours)  # torch's DistributedDataParallel is an abstract base class, through Joinable
            _stand_in(name, _HOMES[name], theirs, ours)
    if way is Way.FSDP:
        _put_fsdp_in_place()
    spawned.follow()


def _put_fsdp_in_place() -> None:
    if not sys.modules["torch"].distributed.is_available():
        return  # nothing that a script could shard with
    # torch's distributed checkpoint keeps torch's class: for models that are not of it, it takes the general way.
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    for module in ("torch.distributed.fsdp", _COMPOSABLE[0]):
        importlib.import_module(module)
    from . import torch_fsdp  # noqa: PLC0415  -- it imports torch

    for name, homes in _FSDP_HOMES.items():
        ours = getattr(torch_fsdp, name)
        found = [vars(sys.modules[home]).get(name) for home in reversed(homes) if home in sys.modules]
        theirs = next((kept for kept in found if kept is not None), None)  # an older torch lacks some
        if theirs is not None and theirs is not ours:
            _stand_in(name, homes, theirs, ours)


def _stand_in(name: str, homes: Sequence[str], theirs: Any, ours: Any) -> None:
    for home in homes:
        if home in sys.modules and getattr(sys.modules[home], name, None) is theirs:
            setattr(sys.modules[home], name, ours)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not _is_ours_or_torchs(module.__name__):
            for alias in (name, _ALIASES.get(name, name)):
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

    def __init__(self, way: Way) -> None:
        self._way = way

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._way)
        return spec


def _call_after(loader: Any, way: Way) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        del loader.exec_module  # the loader is as it was
        put_in_place(way)

    loader.exec_module = exec_module
