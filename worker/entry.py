"""A function that a worker calls before its script, as the agent asks: ``--parallel`` is one.

The worker's side knows nothing of what it does: it is named as ``module:function``.
"""

from __future__ import annotations

import importlib
import os
import sys

from .hooked import package_root


def call(entry: str) -> None:
    """Import the module and call the function, without arguments.

    An interpreter that has no dlaunch of its own finds the one that started it.
    """
    module, _, function = entry.partition(":")
    root = package_root()
    sys.path.append(root)
    try:
        importlib.import_module(module.partition(".")[0])
    finally:
        sys.path.remove(root)
    sys.path_importer_cache.pop(root, None)
    try:
        getattr(importlib.import_module(module), function)()
    except Exception as error:
        os.write(2, f"dlaunch: {error}\n".encode(errors="replace"))
        os._exit(1)
