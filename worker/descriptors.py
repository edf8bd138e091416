"""File descriptors of a process on its way to being a worker."""

from __future__ import annotations

import fcntl
import os
import resource
import stat

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from collections.abc import Collection

_OUT_OF_THE_WAY = 512  # scripts find the low numbers free, as under plain Python


def open_descriptors() -> set[int]:
    """The descriptors that are open now."""
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if _mode(fd) is not None}  # noqa: PTH208


def close_all_but(kept: Collection[int]) -> None:
    """Close everything else; a fork inherits close-on-exec descriptors too."""
    for fd in open_descriptors().difference(kept):
        os.close(fd)


def out_of_the_way(fd: int) -> int:
    """A close-on-exec duplicate with a high number; ``fd`` itself is closed."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = _OUT_OF_THE_WAY if soft == resource.RLIM_INFINITY else min(_OUT_OF_THE_WAY, soft // 2)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return moved


def is_socket(fd: int) -> bool:
    """Whether ``fd`` is open and a socket."""
    mode = _mode(fd)
    return mode is not None and stat.S_ISSOCK(mode)


def _mode(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_mode
    except OSError:
        return None
