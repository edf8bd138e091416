"""Run by its path in a process that multiprocessing starts anew, before it imports the script; see `spawned`."""

from __future__ import annotations

import sys
from pathlib import Path

_root = str(Path(__file__).parents[3])
sys.path.append(_root)  # an interpreter that has no dlaunch of its own finds the one that started it
try:
    from dlaunch.parallel.scripts.patch import apply_as_asked
finally:
    sys.path.remove(_root)

apply_as_asked()
