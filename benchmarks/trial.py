"""One trial of a launcher: a marked run in a folder of its own, of which nothing is left afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from process_tree import MARK, Process, collect_zombies, kill_all, now, processes_of, wait_until_gone

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).parent / "programs"
GONE_LIMIT_S = 20.0


class TimedOut(Exception):
    """The run did not get there in time: it hangs."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start a script on several processes."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    def start(self, nproc: int, program: str, *arguments: str, max_restarts: int = 0) -> list[str]:
        """The command line that runs one of our programs."""
        flags = [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        return [*self.command, *flags, str(PROGRAMS / program), *arguments]


WARM = Launcher("dlaunch", (str(BIN / "dlaunch"), "run"))
EXEC = Launcher("dlaunch exec", (str(BIN / "dlaunch"), "run", "--start-method=exec"))
TORCHRUN = Launcher("torchrun", (str(BIN / "torchrun"), "--standalone"))
TORCHRUN_UNSHARED = Launcher("torchrun, own store", TORCHRUN.command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


class Trial:
    """A run in progress. On leaving, whatever still lives of it is killed; `left` is what should not have lived."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlaunch-bench-"))
        self.left: list[Process] = []
        self.started_at = 0.0
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **(environment or {}), MARK: self._mark}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.left = wait_until_gone(self._mark, GONE_LIMIT_S)
        kill_all(self._mark)
        if self._process is not None:
            self._process.wait()
        collect_zombies(spared=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: Sequence[str]) -> None:
        """Start a command; its output goes to a file."""
        self.started_at = now()
        with (self.folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    @property
    def pid(self) -> int:
        """Of the launcher itself."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """What the run has printed."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[Process]:
        """All of the run that live."""
        return processes_of(self._mark)

    def finish(self) -> None:
        """Tell the program to end."""
        (self.folder / "finish").touch()

    def until(self, is_so: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Wait for something; raises TimedOut at the limit, and when the run has ended before."""
        assert self._process is not None
        deadline = now() + limit_s
        while not is_so():
            ended = self._process.poll() is not None
            if now() > deadline or (ended and not is_so()):
                raise TimedOut
            time.sleep(0.001)

    def end(self, limit_s: float = 120.0) -> int:
        """Wait for the launcher's end; its return code."""
        assert self._process is not None
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimedOut from None
