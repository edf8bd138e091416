"""Processes that a script starts through multiprocessing find our classes too.

``spawn`` and ``forkserver`` begin in an interpreter that knows nothing of us. multiprocessing sends it a dictionary of
what it needs, over a pipe of its own, before the script is imported there. We add one entry, which does there what was
done here as soon as it is read; multiprocessing itself looks only at entries that it knows (CPython 3.10 to 3.14,
Lib/multiprocessing/spawn.py: ``get_preparation_data``, ``prepare``). Forked processes have ours already.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_ENTRY = "dlaunch"


def follow() -> None:
    """Let processes that are started from now on find our classes. A second time changes nothing."""
    theirs = spawn.get_preparation_data
    if not isinstance(theirs, _Preparation):
        spawn.get_preparation_data = _Preparation(theirs)


class _Preparation:
    """What multiprocessing sends ahead, and our entry."""

    def __init__(self, theirs: Callable[[str], dict[str, Any]]) -> None:
        self._theirs = theirs

    def __call__(self, name: str) -> dict[str, Any]:
        return {**self._theirs(name), _ENTRY: _Arrival()}


class _Arrival:
    """Where it is unpickled, ``arrival.py`` is run."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return runpy.run_path, (str(Path(__file__).with_name("arrival.py")),)
