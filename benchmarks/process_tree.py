"""Finds every process of a run, wherever it has gone: by a variable that all of them inherit.

A process that forked twice, started a session of its own and lost its parents still has the environment it was born
with. Linux only: all of it is read from /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "BENCHMARK_RUN"  # the variable; its value is different for every run
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc tells it."""

    pid: int
    parent: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} (parent {self.parent}): {self.command}"


def now() -> float:
    """Seconds on CLOCK_BOOTTIME, the one clock of all processes of this host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def processes_of(mark: str) -> list[Process]:
    """Every living process that was born with this mark; a zombie is not one."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in _entries():
        if needle in _read(entry, "environ").split(b"\0") and (process := _process(entry)):
            found.append(process)
    return found


def children_of(pid: int, processes: list[Process]) -> list[Process]:
    """Those of ``processes`` whose parent is ``pid``, the oldest first."""
    return sorted((process for process in processes if process.parent == pid), key=lambda process: process.pid)


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal."""
    found = re.search(rb"^SigCgt:\s+([0-9a-f]+)$", _read(str(pid), "status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signum - 1) & 1)


def wait_until_gone(mark: str, limit_s: float) -> list[Process]:
    """Wait until no process of the run lives; return those that still do at the limit."""
    deadline = now() + limit_s
    while (left := processes_of(mark)) and now() < deadline:
        _wait_for_any(left, deadline)
    return left


def kill_all(mark: str) -> None:
    """SIGKILL whatever lives of a run, until nothing does."""
    while left := processes_of(mark):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _wait_for_any(left, now() + 1.0)


def adopt_orphans() -> None:
    """Become the parent of what a run leaves behind, so that its zombies can be collected."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def collect_zombies(spared: int) -> None:
    """Reap adopted children that are dead; never ``spared``, whose own parent object waits for it."""
    for entry in _entries():
        if int(entry) != spared and _parent_and_state(entry) == (os.getpid(), "Z"):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(entry), os.WNOHANG)


def _entries() -> list[str]:
    """The names of the folders in /proc that stand for processes."""
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]


def _wait_for_any(processes: list[Process], deadline: float) -> None:
    """Return when one of them has ended, or at the deadline, or soon (one may be born meanwhile)."""
    try:
        fd = os.pidfd_open(processes[0].pid)
    except ProcessLookupError:
        return
    try:
        select.select([fd], [], [], max(0.0, min(0.1, deadline - now())))
    finally:
        os.close(fd)


def _process(entry: str) -> Process | None:
    parent, state = _parent_and_state(entry)
    if state in ("Z", "X", ""):
        return None
    command = _read(entry, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(int(entry), parent, command)


def _parent_and_state(entry: str) -> tuple[int, str]:
    fields = _read(entry, "stat").rpartition(b")")[2].split()
    return (int(fields[1]), fields[0].decode()) if fields else (0, "")


def _read(entry: str, name: str) -> bytes:
    try:
        return Path("/proc", entry, name).read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""
