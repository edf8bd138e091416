"""Where a run keeps its files: ``<log_dir>/<run_id>_<8 random>/attempt_<n>/<local_rank>/``, as torchrun has it.

Beside them stands ``record.json``, what the run tells to commands from outside. The default ``log_dir`` is a private
directory of the user's. It also has a link to each run directory elsewhere, so all runs of a user are found there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from dlaunch.errors import ConfigurationError
from dlaunch.spec import JobSpec

KEPT_RUNS = 50  # finished runs in the default directory

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+-]+")
_LONGEST_NAME = 100
_RUN_DIR = re.compile(r".+_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """One worker's files in one attempt; None where no files are kept."""

    stdout: Path | None = None
    stderr: Path | None = None
    error: Path | None = None


@dataclass(frozen=True, slots=True)
class AttemptFiles:
    """What an attempt's workers share: copies of the lines that the duplicate filters chose; None without filters."""

    filtered_stdout: Path | None = None
    filtered_stderr: Path | None = None


class RunDirectory:
    """The directory of one run on this node. Nothing in it is ever deleted or written anew by the run itself.

    While this object is open, the directory is locked: that is how others see that the run's agent lives.
    """

    def __init__(self, path: Path | None, *, stdout_filtered: bool = False, stderr_filtered: bool = False) -> None:
        self.path = path
        self._filtered = (stdout_filtered, stderr_filtered)
        self._lock = _lock(path) if path is not None else None

    @classmethod
    def create(cls, spec: JobSpec) -> RunDirectory:
        """Make the directory that ``spec`` asks for; with ``keep_files`` off, one without a place on disk.

        Raises ConfigurationError when it cannot be made.
        """
        output = spec.output
        if not output.keep_files:
            return cls(None)
        parent = default_log_dir() if output.log_dir is None else _given_log_dir(output.log_dir)
        path = _make_run_dir(parent, safe_name(spec.run_id), private=output.log_dir is None)
        if output.log_dir is not None:
            _link_from_default(path)
        return cls(path, stdout_filtered=bool(output.stdout_filters), stderr_filtered=bool(output.stderr_filters))

    @property
    def record(self) -> Path | None:
        """The place of ``record.json``."""
        return None if self.path is None else self.path / "record.json"

    def attempt(self, number: int) -> AttemptFiles:
        """The places of an attempt's shared files. Whoever writes them makes their directory."""
        if self.path is None:
            return AttemptFiles()
        directory = self.path / f"attempt_{number}"
        stdout, stderr = self._filtered
        return AttemptFiles(
            filtered_stdout=directory / "filtered_stdout.log" if stdout else None,
            filtered_stderr=directory / "filtered_stderr.log" if stderr else None,
        )

    def worker(self, attempt: int, local_rank: int) -> WorkerFiles:
        """The places of one worker's files. Whoever writes them makes their directory."""
        if self.path is None:
            return WorkerFiles()
        directory = self.path / f"attempt_{attempt}" / str(local_rank)
        return WorkerFiles(directory / "stdout.log", directory / "stderr.log", directory / "error.json")

    def close(self) -> None:
        """Unlock the directory: from here on it counts as that of a finished run."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def safe_name(run_id: str) -> str:
    """``run_id`` as a file name: no slash, no leading dot or dash, nothing that a shell would trip over."""
    name = _UNSAFE.sub("_", run_id).lstrip(".-")
    return name[:_LONGEST_NAME] or "none"


def default_log_dir() -> Path:
    """The user's own directory below the temporary one, made if it is missing, readable by nobody else.

    Raises ConfigurationError when something that is not ours stands in its place.
    """
    path = default_log_path()
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()  # not stat: a link there may be another user's trap
    except OSError as error:
        raise _cannot_use(path, error) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = "belongs to another user" if stat.S_ISDIR(found.st_mode) else "is not a directory"
        raise ConfigurationError(f"{path} {what}.", "Remove it, or give a directory of your own with --log-dir.")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def default_log_path() -> Path:
    """The name of the default log directory, which may not exist."""
    import tempfile  # noqa: PLC0415  -- costs some ms at start-up

    try:
        base = tempfile.gettempdir()
    except FileNotFoundError:  # no directory can be written; who makes ours will hear so
        base = "/tmp"
    return Path(base) / f"dlaunch-{os.getuid()}"


def prune_old_runs(base: Path, keep: int = KEPT_RUNS) -> None:
    """Of the finished runs in ``base``, the default log directory, remove all but the newest ``keep``.

    A run whose agent lives is never touched: its agent holds the lock of its directory. Of a run that is kept
    elsewhere only the link goes. What cannot be removed is left.
    """
    with contextlib.suppress(OSError):
        runs = [entry for entry in base.iterdir() if _RUN_DIR.fullmatch(entry.name)]
        for entry in sorted(runs, key=_changed_at, reverse=True)[keep:]:
            _remove_if_finished(entry)


def _changed_at(entry: Path) -> float:
    try:
        return entry.lstat().st_mtime
    except OSError:  # another dlaunch removed it just now
        return 0.0


def _remove_if_finished(entry: Path) -> None:
    lock = _lock(entry)
    try:
        if entry.is_symlink():
            if lock is not None or not entry.exists():
                entry.unlink(missing_ok=True)
        elif lock is not None:
            shutil.rmtree(entry, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Lock a directory without waiting; None when another process holds it, or when it cannot be locked.

    The kernel drops the lock with the last process that has it open, so it says that an agent lives, in whatever
    container, where a pid in a file would not.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _given_log_dir(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_use(path, error) from None
    return path.absolute()


def _make_run_dir(parent: Path, name: str, *, private: bool) -> Path:
    while True:
        path = parent / f"{name}_{os.urandom(4).hex()}"
        try:
            path.mkdir(mode=0o700 if private else 0o777)  # of a directory that the user gave, the umask decides
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_use(parent, error) from None


def _link_from_default(path: Path) -> None:
    """Leave a link in the default directory. A run does not fail because only that cannot be done."""
    with contextlib.suppress(OSError, ConfigurationError):
        (default_log_dir() / path.name).symlink_to(path)


def _cannot_use(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"The log directory {path} cannot be written: {error.strerror}.",
        "Give one that can with --log-dir, or --log-dir /dev/null for no log files.",
    )
