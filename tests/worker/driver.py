"""A small agent for tests: a real guard, a real starter, real workers, and the frames that they exchange."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import dlaunch
from dlaunch import frames

PATIENCE_S = 90.0  # for a machine under heavy load; nothing here waits for time to pass
GUARD = Path(dlaunch.__file__).parent / "worker" / "guard.py"


class Collected:
    """All that comes out of a pipe, read in the background so that nobody is ever blocked."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._data = bytearray()
        self._grown = threading.Condition()
        self._ended = False
        threading.Thread(target=self._collect, daemon=True).start()

    def all(self) -> bytes:
        """Everything, once the last writer has closed."""
        with self._grown:
            assert self._grown.wait_for(lambda: self._ended, PATIENCE_S), f"still open after {bytes(self._data)!r}"
            return bytes(self._data)

    def lines(self, count: int) -> list[str]:
        """The first ``count`` lines, as soon as they are there."""
        with self._grown:
            assert self._grown.wait_for(lambda: self._ended or self._data.count(b"\n") >= count, PATIENCE_S)
            found = self._data.decode().splitlines()[:count]
        assert len(found) == count, found
        return found

    def _collect(self) -> None:
        while True:
            data = os.read(self._read_end, 1 << 16)
            with self._grown:
                self._data += data
                self._ended = not data
                self._grown.notify_all()
            if not data:
                os.close(self._read_end)
                return


class Worker:
    """A worker that was asked for, and what it says."""

    def __init__(self, process_id: int) -> None:
        self.id = process_id
        self.out = Collected()
        self.err = Collected()
        self.channel, self.channel_end = socket.socketpair()
        self.channel.settimeout(PATIENCE_S)

    def fds(self) -> list[int]:
        """What goes with the request."""
        return [self.out.write_end, self.err.write_end, self.channel_end.fileno()]

    def requested(self) -> None:
        """Our copies of the worker's ends are not needed any more."""
        os.close(self.out.write_end)
        os.close(self.err.write_end)
        self.channel_end.close()

    def said(self) -> list[frames.Frame]:
        """All frames of the worker's own, once it has ended."""
        heard = []
        while received := frames.receive(self.channel):
            heard.append(received[0])
        return heard


class Driver:
    """One guard and one starter. A context manager: on leaving, all of it is dead."""

    def __init__(
        self,
        mode: str,
        command: Sequence[str] = (),
        *,
        preload: Sequence[str] = (),
        torch: bool = False,
        environment: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        hold: Sequence[int] = (),
    ) -> None:
        self._command = list(command)
        self._ids = iter(range(1_000_000))
        self._kept: list[frames.Frame] = []
        self.guard_socket, guard_end = socket.socketpair()
        self.socket, starter_end = socket.socketpair()
        self.guard_socket.settimeout(PATIENCE_S)
        self.socket.settimeout(PATIENCE_S)
        with guard_end, starter_end:
            self.guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(guard_end.fileno())],
                pass_fds=[guard_end.fileno()],
                start_new_session=True,
                env=inherited,
                cwd=cwd,
                stdin=stdin,
            )
            start = {"kind": "start", "mode": mode, "command": self._command, "environment": dict(environment or {})}
            frames.send(
                self.guard_socket, {**start, "preload": list(preload), "defaults": torch}, [starter_end.fileno()]
            )
            for fd in hold:
                frames.send(self.guard_socket, {"kind": "hold"}, [fd])
        self.starter_pid: int = self.guard_says("starter_started")["pid"]

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()
        self.guard_socket.close()
        self.guard.wait(PATIENCE_S)

    def spawn(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        command: Sequence[str] | None = None,
        python: bool = True,
    ) -> Worker:
        """Ask for a worker."""
        worker = Worker(next(self._ids))
        request = {"kind": "spawn", "id": worker.id, "environment": dict(environment or {}), "arguments": arguments}
        self.ask({**request, "command": list(command or self._command), "python": python}, worker.fds())
        worker.requested()
        return worker

    def ask(self, frame: frames.Frame, fds: Sequence[int] = ()) -> None:
        """Send a request to the starter."""
        frames.send(self.socket, frame, fds)

    def starter_says(self, kind: str, process_id: int | None = None) -> frames.Frame:
        """The next frame of this kind (and about this process); others are kept for later."""
        for frame in self._kept:
            if _is(frame, kind, process_id):
                self._kept.remove(frame)
                return frame
        while received := frames.receive(self.socket):
            if _is(received[0], kind, process_id):
                return received[0]
            self._kept.append(received[0])
        raise AssertionError(f"the starter closed; it said {self._kept}")

    def last_words(self) -> list[frames.Frame]:
        """What the starter says before it closes, without ``ready``."""
        while received := frames.receive(self.socket):
            self._kept.append(received[0])
        return [frame for frame in self._kept if frame["kind"] != "ready"]

    def guard_says(self, kind: str) -> frames.Frame:
        """The guard's next frame, which must be of this kind."""
        received = frames.receive(self.guard_socket)
        assert received is not None, "the guard closed"
        assert received[0]["kind"] == kind, received[0]
        return received[0]

    def exit_code(self, worker: Worker) -> int:
        """How a worker ended: its exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(self.starter_says("exited", worker.id)["status"])

    def sweep(self, gentle_s: float = 0.0) -> list[Any]:
        """End what workers left; what had to be killed."""
        self.ask({"kind": "sweep", "gentle_s": gentle_s})
        killed: list[Any] = self.starter_says("swept")["killed"]
        return killed


def _is(frame: frames.Frame, kind: str, process_id: int | None) -> bool:
    return frame["kind"] == kind and (process_id is None or frame.get("id") == process_id)
