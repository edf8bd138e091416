"""Which frames of a traceback belong to the user: a pure choice."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import dlaunch
from dlaunch.outcome import TracebackFrame

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|^<frozen |python3?\d*\.zip/")
_PARTS = ("launcher", "agent", "worker", "parallel")


def own_frames(frames: Sequence[TracebackFrame], ours: Sequence[str] | None = None) -> tuple[TracebackFrame, ...]:
    """The frames of the script's own code; those of libraries where there are no others; never one of dlaunch's.

    ``ours`` are the folders of dlaunch.
    """
    roots = tuple(ours if ours is not None else _our_folders())
    theirs = tuple(frame for frame in frames if not frame.file.startswith(roots))
    return tuple(frame for frame in theirs if not _LIBRARY.search(frame.file)) or theirs


def _our_folders() -> list[str]:
    """Of an installation and of a checkout, where the packages stand behind links."""
    package = os.path.dirname(os.path.abspath(dlaunch.__file__))  # noqa: PTH100, PTH120
    folders = [package, *(os.path.realpath(os.path.join(package, part)) for part in _PARTS)]  # noqa: PTH118
    return [folder + os.sep for folder in folders]
