"""Fixtures for tests that drive the real command and look at real processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A loaded machine is no bug. The suite plays the same cases each time; `make fuzz` looks for new ones.
settings.register_profile("dlaunch", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile("dlaunch")

# What a shell runs in the background has these ignored, and dlaunch honours that; the tests send them.
for _signum in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.SIG_DFL)

MARK = "DLAUNCH_TEST_MARK"  # in the environment of every process of one run
DEADLINE_S = 60.0  # for anything that should happen at once, on a loaded machine


@dataclass
class Done:
    """A run that has ended."""

    exit_code: int
    stdout: str
    stderr: str


class Job:
    """A real ``dlaunch`` process and all that it starts."""

    def __init__(self, directory: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory
        self.log_dir = directory / "logs"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "DLAUNCH_", "TORCHELASTIC_"))}
        self._lines: list[str] = []
        self._pending = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlaunch", "--log-dir", str(self.log_dir), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env={**clean, MARK: self.mark, "PYTHONUNBUFFERED": "1", **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, having: str, count: int = 1) -> str:
        """Wait for the ``count``-th line of stdout that holds ``having``."""
        assert self.process.stdout
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = [line for line in self._lines if having in line]
            if len(found) >= count:
                return found[count - 1]
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.process.stdout], [], [], left)[0]
            assert ready, f"no line with {having!r} in {self._lines}"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"output ended without a line with {having!r}: {self._lines} {self._errors()}"
            *lines, self._pending = (self._pending + data).split(b"\n")
            self._lines += [line.decode() for line in lines]

    def _errors(self) -> str:
        assert self.process.stderr
        return self.process.stderr.read().decode() if self.process.poll() is not None else ""

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self, timeout: float = DEADLINE_S) -> Done:
        """Wait for the end of the command."""
        out, err = self.process.communicate(timeout=timeout)
        stdout = "".join(line + "\n" for line in self._lines) + self._pending.decode() + out.decode()
        return Done(self.process.returncode, stdout, err.decode())

    def processes(self) -> list[int]:
        """Every live process that carries this run's mark, wherever it has gone."""
        return [pid for pid in all_pids() if has_mark(pid, self.mark)]

    def nothing_left(self) -> None:
        """Assert that no process of the run lives, after the moments that a kill may take."""
        deadline = time.monotonic() + DEADLINE_S
        while left := self.processes():
            assert time.monotonic() < deadline, [describe(pid) for pid in left]
            time.sleep(0.02)  # there is no event for the end of somebody else's process

    def record(self) -> dict[str, Any]:
        (file,) = self.log_dir.glob("*/record.json")
        document: dict[str, Any] = json.loads(file.read_text())
        return document

    def log(self, local_rank: int, attempt: int = 0, stream: str = "stdout") -> str:
        (file,) = self.log_dir.glob(f"*/attempt_{attempt}/{local_rank}/{stream}.log")
        return file.read_text()


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def has_mark(pid: int, mark: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z" and mark in Path(f"/proc/{pid}/environ").read_text(
            errors="replace"
        )
    except OSError:
        return False


def describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return f"{pid} {parent} {command}"
    return f"{pid} gone"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a Python script; returns its path."""

    def write(code: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start real runs; whatever is left of them at the end of the test is killed, and fails it."""
    jobs: list[Job] = []

    def start(*args: str, env: dict[str, str] | None = None) -> Job:
        jobs.append(Job(tmp_path, *args, env=env))
        return jobs[-1]

    yield start
    for each in jobs:
        each.process.kill()
        with contextlib.suppress(ValueError):
            each.process.communicate(timeout=DEADLINE_S)
        try:
            each.nothing_left()
        finally:
            for pid in each.processes():
                os.kill(pid, signal.SIGKILL)
