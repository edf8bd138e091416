"""What a warm starter imports once, so that no worker has to."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from .birth import fork_quietly

# What a first training step and a first save with torch would otherwise import lazily (torch 2.13: nothing is left).
DEFAULTS = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",  # DistributedDataParallel's constructor and the optimizers pull it in: 820 modules
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.distributed.checkpoint",
)
# torch._dynamo sets it where it is missing; a worker's own ``setdefault`` would come too late.
_TAKEN_BACK = ("TORCHINDUCTOR_CACHE_DIR",)


class Refused(Exception):
    """The starter cannot be forked from after this; the text is one sentence for the user."""

    def __init__(self, sentence: str, module: str | None, *, asked: bool) -> None:
        super().__init__(sentence)
        self.module = module
        self.asked = asked


def preload(asked: Sequence[str], unasked: Sequence[str]) -> list[str]:
    """Import what of ``unasked`` exists here, then what the user asked for; the names of what was imported.

    Raises Refused when a module fails, starts a Python thread, or touches CUDA: none of that survives a fork.
    """
    before = dict(os.environ)
    try:
        present = [name for name in unasked if _import_if_there(name)]
        _check("torch", asked=False)
        for name in asked:
            _import_asked(name)
            _check(name, asked=True)
    finally:
        for variable in _TAKEN_BACK:
            if variable not in before:
                os.environ.pop(variable, None)
    return [*present, *asked]


def _import_if_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return False  # no torch here, or one without this part
        raise _failed(name, error, asked=False) from None
    except Exception as error:
        raise _failed(name, error, asked=False) from None
    return True


def _import_asked(name: str) -> None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _failed(name, error, asked=True) from None


def _failed(name: str, error: BaseException, *, asked: bool) -> Refused:
    who = f"the module {name} of --preload" if asked else f"the module {name}"
    return Refused(f"{who} cannot be imported: {type(error).__name__}: {error}.", name, asked=asked)


def _check(name: str, *, asked: bool) -> None:
    if len(sys._current_frames()) > 1:
        raise Refused(f"importing {name} starts Python threads, which a fork would lose.", name, asked=asked)
    if _touched_cuda():
        raise Refused(f"importing {name} touches CUDA, which cannot be used again after a fork.", name, asked=asked)


def _touched_cuda() -> bool:
    """Whether a forked worker could no longer initialise CUDA; asked of a throw-away fork, which is what knows it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    if cuda.is_initialized():
        return True
    pid = fork_quietly()
    if pid == 0:
        os._exit(bool(cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0
