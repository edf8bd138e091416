"""Finding every process of a test, whatever it has become the child of: by a mark in the environment it inherited."""

from __future__ import annotations

import os
import select
import signal
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from .driver import PATIENCE_S

VARIABLE = "DLAUNCH_TEST_MARK"


def new_mark() -> str:
    """A value that no other process has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """The processes with this mark that still run."""
    wanted = f"{VARIABLE}={mark}".encode()
    return [
        pid for pid in _all() if wanted in _read(pid, "environ") and _read(pid, "stat").rpartition(b")")[2][1:2] != b"Z"
    ]


def kill_marked(mark: str) -> None:
    """Leave none of them."""
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: Iterable[int]) -> list[int]:
    """Wait for all of these processes to end; those that did not in time."""
    deadline = monotonic() + PATIENCE_S
    return [pid for pid in pids if not _ends_before(deadline, pid)]


def _ends_before(deadline: float, pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - monotonic()) * 1000))
    finally:
        os.close(fd)


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
