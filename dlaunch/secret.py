"""Reads the password of etcd, from the variable's value or a file that nobody else can read; it is shown nowhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import ConfigurationError
from .rendezvous_spec import RendezvousSpec

_MOST_BYTES = 4096


def password_of(rendezvous: RendezvousSpec) -> str | None:
    """The password for ``rendezvous.user``, read anew at each call; None where there is none.

    Raises ConfigurationError, which names the file and never what is in it.
    """
    if rendezvous.password_file is not None:
        return read_password_file(rendezvous.password_file)
    return rendezvous.password


def read_password_file(path: Path) -> str:
    """The one line in ``path``, without its end; raises ConfigurationError for a file that others can read.

    The group may read a file of root's, as Kubernetes mounts secrets for a process that is not root.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not block us
    except (OSError, ValueError) as error:
        raise _unusable(path, _reason(error), "Give another --rdzv-password-file.") from None
    try:
        _check_status(path, os.fstat(fd))  # of this very file, whatever its name means by now
        content = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    return _one_line(path, content)


def _check_status(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "it is not a regular file", "Give another --rdzv-password-file.")
    forbidden, allowed = (0o037, "g-wx,o=") if status.st_uid == 0 else (0o077, "go=")
    if status.st_mode & forbidden:
        raise _unusable(path, "others can read or change it", f"Say: chmod {allowed} {path}.")


def _one_line(path: Path, content: bytes) -> str:
    line = content.removesuffix(b"\n").removesuffix(b"\r")
    if not line:
        raise _unusable(path, "it is empty", "Write the password into it.")
    if len(content) > _MOST_BYTES or b"\n" in line or b"\0" in line:
        raise _unusable(path, "it holds more than one line", "Write only the password into it.")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise _unusable(path, "it is not UTF-8", "Write the password as text.") from None


def _unusable(path: Path, reason: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"The password file {str(path)!r} cannot be used: {reason}.", fix)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else "a bad name").lower()
