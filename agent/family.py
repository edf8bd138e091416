"""Ending processes that are below us, whatever state they are in."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dlaunch.clock import now

if TYPE_CHECKING:
    import psutil

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 10.0  # SIGKILL is immediate, except for a process in uninterruptible sleep


def become_subreaper() -> None:
    """Adopt descendants whose parents die, in place of init. Source: prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_everything_below(pid: int, spared: Collection[int] = ()) -> list[int]:
    """SIGKILL all descendants of ``pid`` until none is left; returns those that could not be killed in time.

    ``spared`` are children that live on, with all below them. To be called by ``pid`` itself, a subreaper: what loses
    its parent on the way falls to it and is found again.
    """
    import psutil  # noqa: PLC0415  -- 20 ms that only a lost process costs

    deadline = now() + PATIENCE_S
    me = psutil.Process(pid)
    while children := _living_below(me, spared):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=0.1)
        if now() > deadline:
            return [child.pid for child in children]
    _reap_adopted()
    return []


def _living_below(process: psutil.Process, spared: Collection[int]) -> list[psutil.Process]:
    from psutil import NoSuchProcess  # noqa: PLC0415

    found = []
    for child in process.children():
        if child.pid not in spared:
            with contextlib.suppress(NoSuchProcess):
                found += [one for one in [child, *child.children(recursive=True)] if one.status() != "zombie"]
    return found


def handles(pid: int, signum: int) -> bool:
    """Whether a process catches or ignores a signal, so that sending it cannot end it by default."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return bool((int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)) >> (signum - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False


def _reap_adopted() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
