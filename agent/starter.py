"""The agent's end of the guard and the starter: starting them, asking them, hearing them.

The tree is agent -> guard -> starter -> workers. The guard is there for one case that nothing else covers: agent and
starter killed at the same instant, with grandchildren alive. Frames are described in docs/architecture.md.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import dlaunch
from dlaunch import frames
from dlaunch.clock import now
from dlaunch.spec import JobSpec, StartMethod

from .family import kill_everything_below

SEND_TIMEOUT_S = 5.0  # a starter that does not take a request for so long is taken for lost
DISMISSAL_S = 5.0  # how long both may take to end when they are dismissed
_GUARD = Path(dlaunch.__file__).parent / "worker" / "guard.py"


class Starter:
    """One guard and one starter, from their start to their end."""

    def __init__(self, spec: JobSpec, method: StartMethod) -> None:
        self.guard_socket, guard_end = socket.socketpair()
        self.socket, starter_end = socket.socketpair()
        self.swept = False  # the guard said that nothing is left
        self._guard_reader = frames.FrameReader()
        self._reader = frames.FrameReader()
        for sock in (self.socket, self.guard_socket):
            sock.settimeout(SEND_TIMEOUT_S)
        with guard_end, starter_end:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(guard_end.fileno())],
                pass_fds=[guard_end.fileno()],
                start_new_session=True,
            )
            frames.send(self.guard_socket, _start_frame(spec, method), [starter_end.fileno()])

    @property
    def guard_pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    def ask(self, frame: frames.Frame, fds: Sequence[int] = ()) -> None:
        """Send a request to the starter. One that cannot be delivered is dropped: its loss is told by the guard."""
        try:
            frames.send(self.socket, frame, fds)
        except TimeoutError:
            self.destroy()
        except OSError:
            pass

    def read(self) -> list[frames.Frame] | None:
        """The starter's frames that have arrived; None when it has closed."""
        return _read(self.socket, self._reader)

    def read_guard(self) -> list[frames.Frame] | None:
        """The guard's frames that have arrived; None when it has closed."""
        return _read(self.guard_socket, self._guard_reader)

    def dismiss_and_wait(self) -> None:
        """Let both end: the starter at the closing of its socket, then the guard."""
        self.socket.close()
        deadline = now() + DISMISSAL_S
        while (left_s := deadline - now()) > 0:
            if not select.select([self.guard_socket], [], [], left_s)[0]:
                break
            heard = self.read_guard()
            if heard is None:
                return
            self.swept = self.swept or any(frame["kind"] == "swept" for frame in heard)
        self.destroy()

    def destroy(self) -> None:
        """SIGKILL guard, starter and all below them, even if they are stopped (SIGSTOP) or hang."""
        kill_everything_below(os.getpid())

    def reap(self) -> None:
        """Collect the guard's exit status; if it died without saying that nothing is left, see to it."""
        self._guard.wait()
        if not self.swept:
            kill_everything_below(os.getpid())
        self.socket.close()
        self.guard_socket.close()


def _start_frame(spec: JobSpec, method: StartMethod) -> frames.Frame:
    return {
        "kind": "start",
        "mode": method.value,
        "command": spec.program.command() if method is StartMethod.WARM else [],
        "environment": dict(spec.environment),
        "preload": list(spec.preload),
    }


def _read(sock: socket.socket, reader: frames.FrameReader) -> list[frames.Frame] | None:
    try:
        data = sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return []
    except OSError:
        return None
    try:
        return list(reader.feed(data)) if data else None
    except frames.FrameError:
        return None
