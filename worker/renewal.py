"""Making new in a forked worker what a fork copies but a new interpreter would have afresh."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any


def renew(changed: Collection[str]) -> None:
    """Renew whatever of it is loaded; ``changed`` are the variables that torch has seen with other values, or not."""
    _renew_streams()
    _renew_main()
    if threading := sys.modules.get("threading"):
        threading.main_thread()._set_native_id()  # Python 3.11 keeps the parent's
    if process := sys.modules.get("multiprocessing.process"):
        _renew_multiprocessing(process)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # the module random does so itself after a fork
    if torch := sys.modules.get("torch"):
        _renew_torch(torch, changed)


def _renew_main() -> None:
    """Put a new, equal module in the place of the empty ``__main__``.

    The old one was frozen with the rest (``gc.freeze``). Its namespace would never be collected, and neither would what
    the script keeps in it: at exit, no destructor of a global would run, and no open file would be written out.
    """
    old = sys.modules["__main__"]
    new = type(old)("__main__")
    vars(new).clear()
    vars(new).update(vars(old))
    if "__annotations__" in vars(new):  # from Python 3.14 on it is made when it is needed
        vars(new)["__annotations__"] = {}
    sys.modules["__main__"] = new


def _renew_multiprocessing(process: Any) -> None:
    process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    with suppress(OSError):  # the folder may have been removed
        process.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109  -- a string


def _renew_torch(torch: Any, changed: Collection[str]) -> None:
    torch.default_generator.seed()  # and not torch.seed(), which would touch the accelerators
    if "OMP_NUM_THREADS" in changed and os.environ["OMP_NUM_THREADS"].isdecimal():
        torch.set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"])))
    if "TORCH_DISTRIBUTED_DEBUG" in changed and "torch.distributed" in sys.modules:
        torch.distributed.set_debug_level_from_env()
    if "TORCH_LOGS" in changed and (logs := sys.modules.get("torch._logging._internal")):
        logs._init_logs()


def _renew_streams() -> None:
    """Open ``sys.stdout`` and ``sys.stderr`` anew: they remember whether they can seek, from what they stood on."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, f"__{name}__")
        if type(old) is not io.TextIOWrapper or type(old.buffer) is not io.FileIO:
            continue  # the user's sitecustomize has its own idea
        new = _open_like(old, fd)
        if getattr(sys, name) is old:
            setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _open_like(old: io.TextIOWrapper, fd: int) -> io.TextIOWrapper:
    """As CPython's create_stdio() does it for ``python -u``: neither layer holds anything back."""
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = old.buffer.name
    new = io.TextIOWrapper(raw, old.encoding, old.errors, newline="\n", write_through=True)
    new.mode = "w"  # type: ignore[misc]
    return new
