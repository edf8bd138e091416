"""The processes below one: found through /proc, ended, reaped.

Nothing here needs ``/proc/<pid>/task/<tid>/children``, which many kernels are built without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

_GONE = "ZX"  # states of a process that runs no more
_TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


class Relative(NamedTuple):
    """A process, at the moment it was looked at."""

    pid: int
    parent: int
    session: int
    name: str
    gone: bool


def parse_stat(stat: bytes) -> Relative:
    """One line of /proc/<pid>/stat. The name may hold anything, spaces and parentheses too. Source: proc(5)."""
    head, _, rest = stat.rpartition(b")")
    pid, _, name = head.partition(b" (")
    state, parent, _group, session = rest.split(maxsplit=4)[:4]
    gone = state.decode() in _GONE
    return Relative(int(pid), int(parent), int(session), name.decode("utf-8", "replace"), gone)


def everyone() -> Iterator[Relative]:
    """All processes that can be seen."""
    for entry in os.listdir("/proc"):  # noqa: PTH208  -- pathlib costs 10 ms at the start of every run
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                    yield parse_stat(file.read())
            except OSError:
                continue  # it ended meanwhile


def below(pid: int, population: Iterable[Relative]) -> list[Relative]:
    """The descendants of ``pid``, parents before children."""
    children: dict[int, list[Relative]] = {}
    for relative in population:
        children.setdefault(relative.parent, []).append(relative)
    found: list[Relative] = []
    todo = [pid]
    while todo:
        generation = children.pop(todo.pop(), [])
        found += generation
        todo += [relative.pid for relative in generation]
    return found


def alive_below(pid: int) -> list[Relative]:
    """The descendants of ``pid`` that still run."""
    return [relative for relative in below(pid, everyone()) if not relative.gone]


def has_children() -> bool:
    """Whether this process has a child, dead or alive. None means no descendant either: orphans come to us."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: their process ids and raw wait statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def kill_session(leader: int) -> None:
    """SIGKILL to every process of a session; those that left it are for a sweep."""
    send(leader, signal.SIGKILL)
    for relative in everyone():
        if relative.session == leader and not relative.gone:
            send(relative.pid, signal.SIGKILL)


def send(pid: int, signum: int) -> None:
    """Signal a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):  # it ended; or it became another user's: nobody here can end it
        os.kill(pid, signum)


def is_tidier(pid: int) -> bool:
    """Whether a process ends by itself once the others have: it cleans up after them, or is on its way out already."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:  # noqa: PTH123
            command = file.read(4096)
    except OSError:
        return True
    return not command or any(mark in command for mark in _TIDIERS)  # empty: it has given its memory back
