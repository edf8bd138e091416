"""Imported by CPython while it starts, in place of the user's own ``sitecustomize``; leaves no trace (bootstrap.py)."""

import os
import sys


def _hand_over() -> None:
    modules_before = frozenset(sys.modules)
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120  -- pathlib costs every worker's start
    root = os.environ.get("_DLAUNCH_ROOT", "")
    sys.path.insert(0, root)
    try:
        import dlaunch  # noqa: F401,PLC0415  -- its submodules are found through it
    finally:
        sys.path.remove(root)
    from dlaunch.worker import bootstrap  # noqa: PLC0415

    bootstrap.begin(folder, modules_before)


_hand_over()
