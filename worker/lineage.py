"""Ties between a process and its parent that only prctl(2) can make."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1  # source: linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int, parent: int) -> None:
    """Have the kernel send ``signum`` to this process when ``parent`` dies; survives execve.

    The tie is to the parent's thread, so the parent must fork from a thread that lives as long as it does. A parent
    that died before the call is noticed here: the signal is sent at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lead_session() -> None:
    """Leave the parent's session and process group, unless this process leads one already."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
