"""Modules of a script's own folder that have the name of one that is preloaded.

Under plain Python the script's ``import profile`` finds the ``profile.py`` beside it. In a forked worker it would find
what torch had imported under that name. So such names are forgotten again: the script gets its own, as it should, and
torch keeps what it holds.
"""

from __future__ import annotations

import _imp
import os
import sys
from collections.abc import Set as AbstractSet
from importlib.machinery import PathFinder


def script_folder() -> str | None:
    """What CPython is going to put first on ``sys.path``; None where it puts nothing.

    Source: pymain_run_python() and _PyPathConfig_ComputeSysPathArgv() of CPython, seen from inside ``site``.
    """
    if getattr(sys.flags, "safe_path", False) or not sys.argv:
        return None
    script = sys.argv[0]
    if script == "-m":
        return os.getcwd()  # noqa: PTH109
    if os.path.isdir(script):  # noqa: PTH112
        return script
    return os.path.dirname(os.path.realpath(script))  # noqa: PTH120


def forget_shadowed(folder: str | None, modules_before: AbstractSet[str]) -> None:
    """Forget all loaded modules that ``folder`` has its own of, but for those that were there before the preload."""
    for name in _names_in(folder) if folder is not None else ():
        if name in sys.modules and name not in modules_before and _is_shadowed(name, folder or ""):
            for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
                del sys.modules[loaded]


def _names_in(folder: str) -> set[str]:
    try:
        return {entry.partition(".")[0] for entry in os.listdir(folder)}  # noqa: PTH208
    except OSError:
        return set()


def _is_shadowed(name: str, folder: str) -> bool:
    if name in sys.builtin_module_names or _imp.is_frozen(name):
        return False  # never looked for in folders
    found = PathFinder.find_spec(name, [folder])
    if found is None or found.origin is None:
        return False  # nothing, or a folder without __init__.py, which any module elsewhere goes before
    return found.origin != getattr(sys.modules[name], "__file__", None)
