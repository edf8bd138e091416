"""Only one job at a time saves into a folder: a lock that the kernel lets go of when its process ends.

It is a POSIX record lock on a small file, so no forked child inherits it and NFS knows it. A file system without locks
is used without one. The file says who holds it, for people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from .error import CheckpointError

CLAIM_NAME = ".writer"
_HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that saves, as its claim describes it; empty where nothing is known."""

    host: str = ""
    pid: int = 0
    run: str = ""  # the launcher's name for the job
    attempt: str = ""  # counts its restarts
    rank: str = ""

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return cls(
            socket.gethostname(),
            os.getpid(),
            "" if run == "none" else run,  # what torchrun calls every job that was not given a name
            os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            os.environ.get("RANK", ""),
        )

    @classmethod
    def parse(cls, content: bytes) -> Holder:
        """From a claim's content; an empty one if that is not whole."""
        try:
            told = json.loads(content)
            fields = {name: type(default)(told[name]) for name, default in asdict(cls()).items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError):
            return cls()


def refusal(directory: Path, holder: Holder, here: Holder, *, in_a_group: bool) -> CheckpointError | None:
    """Why ``here`` may not save beside ``holder``; None if it may.

    Ranks that are in a process group agree among themselves who saves. A holder of an earlier attempt of the same job
    is about to end: the launcher would not have started another otherwise.
    """
    same_run = bool(here.run) and holder.run == here.run
    if same_run and (in_a_group or holder.attempt != here.attempt):
        return None
    if same_run:
        return CheckpointError(
            f"Ranks {holder.rank} and {here.rank} both save into {directory}, and they are in no process group.",
            "Call init_process_group() before the first save, or give each rank a directory of its own.",
        )
    who = f"Process {holder.pid} on {holder.host}" if holder.pid else "Another process"
    return CheckpointError(
        f"{who} saves into {directory} already.", "Give this job a directory of its own, or end the other one."
    )


@dataclass(slots=True)
class _Claim:
    fd: int  # closing any descriptor of the file would let go of the lock, so there is one
    pid: int  # a forked child has the descriptor, and not the lock
    savers: int = 0


_claims: dict[Path, _Claim] = {}
_claiming = threading.Lock()


def claim(directory: Path, *, in_a_group: bool) -> CheckpointError | None:
    """Make this process the one that saves into ``directory``, once for each of its savers.

    Returns:
        Why it may not. A directory that is of no use is no reason: the save itself will say so.
    """
    with _claiming:
        held = _claims.get(directory)
        if held is not None and _is_whole(held, directory / CLAIM_NAME):
            held.savers += 1
            return None
        if held is not None:
            os.close(_claims.pop(directory).fd)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            taken = _lock(directory, in_a_group=in_a_group)
        except OSError:
            return None
        if isinstance(taken, CheckpointError):
            return taken
        if taken is not None:
            _claims[directory] = _Claim(taken, os.getpid(), 1)
        return None


def release(directory: Path) -> None:
    """One saver less; the last one lets go."""
    with _claiming:
        held = _claims.get(directory)
        if held is None or held.pid != os.getpid():
            return
        held.savers -= 1
        if held.savers == 0:
            del _claims[directory]
            if _is_whole(held, directory / CLAIM_NAME):
                with contextlib.suppress(OSError):
                    (directory / CLAIM_NAME).unlink()  # while it is locked: who opened it will find out
            os.close(held.fd)


def _is_whole(held: _Claim, path: Path) -> bool:
    """Whether this process holds the lock on what is under the name now."""
    return held.pid == os.getpid() and _is_under(held.fd, path)


def _is_under(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _lock(directory: Path, *, in_a_group: bool) -> int | CheckpointError | None:
    """A descriptor with the lock; the refusal; or None where one goes on without a lock.

    Raises:
        OSError: the file can be neither made nor opened.
    """
    here, path = Holder.here(), directory / CLAIM_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = Holder.parse(os.pread(fd, 4096, 0))
            os.close(fd)
            held = error.errno in _HELD_ELSEWHERE
            return refusal(directory, holder, here, in_a_group=in_a_group) if held else None
        if _is_under(fd, path):
            _describe(fd, here)
            return fd
        os.close(fd)  # the one who held it has just let go and deleted it


def _describe(fd: int, here: Holder) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(here)).encode(), 0)
