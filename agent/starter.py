"""The agent's end of the guard and the starter: starting them, asking them, hearing them.

The tree is agent -> guard -> starter -> workers. The guard is there for one case that nothing else covers: agent and
starter killed at the same instant, with grandchildren alive. Frames are described in docs/architecture.md.

This module imports little: the launcher starts the first starter before it imports the rest of the agent.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import dlaunch
from dlaunch import frames
from dlaunch.clock import now
from dlaunch.environ import alike
from dlaunch.outcome import ExitStatus
from dlaunch.spec import JobSpec, StartMethod
from dlaunch.ways import Way

SEND_TIMEOUT_S = 5.0  # a starter that does not take a request for so long is taken for lost
AIMED_AT_THE_JOB = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)  # not at a guard
DISMISSAL_S = 5.0  # how long both may take to end when they are dismissed
_GUARD = os.path.join(os.path.dirname(os.path.abspath(dlaunch.__file__)), "worker", "guard.py")  # noqa: PTH100,PTH118,PTH120

# Called in every worker before the script: puts our classes under torch's names, as DLAUNCH_PARALLEL says.
_STAND_IN = {
    "call": "dlaunch.parallel.scripts.patch:apply_as_asked",
    "preload": ["dlaunch.parallel.ddp.distributed_data_parallel", "dlaunch.parallel.dp.data_parallel"],
}
_SHARDING = ["torch.distributed.checkpoint.state_dict", "dlaunch.parallel.scripts.torch_fsdp"]


class Starter:
    """One guard and one starter, from their start to their end."""

    def __init__(self, spec: JobSpec, method: StartMethod, local_world_size: int) -> None:
        self.method = method
        self.guard_socket, guard_end = socket.socketpair()
        self.socket, starter_end = socket.socketpair()
        self.spared: tuple[int, ...] = ()  # children of this process that `destroy` leaves alone
        self._swept = False  # the guard said that nothing is left
        self._guard_reader = frames.FrameReader()
        self._reader = frames.FrameReader()
        for sock in (self.socket, self.guard_socket):
            sock.settimeout(SEND_TIMEOUT_S)
        with guard_end, starter_end:
            guard_end.set_inheritable(True)
            command = [sys.executable, "-I", "-S", _GUARD, str(guard_end.fileno())]
            self._guard_pid = os.posix_spawn(command[0], command, os.environ, setsid=True, setsigmask=AIMED_AT_THE_JOB)
            with suppress(OSError):  # a guard that is dead already is noticed like any other death of it
                frames.send(self.guard_socket, _start_frame(spec, method, local_world_size), [starter_end.fileno()])

    def ask(self, frame: frames.Frame, fds: Sequence[int] = ()) -> None:
        """Send a request to the starter. One that cannot be delivered is dropped: its loss is told by the guard."""
        try:
            frames.send(self.socket, frame, fds)
        except TimeoutError:
            self.destroy()
        except OSError:
            pass

    def hold(self, fd: int) -> None:
        """Give the guard a duplicate of a descriptor, to be closed only when nothing is left below the guard."""
        with suppress(OSError):  # a guard that is dead is noticed where it is listened to
            frames.send(self.guard_socket, {"kind": "hold"}, [fd])

    def deadline(self, at: float | None) -> None:
        """Have the starter kill all workers at this time on dlaunch's clock, unless it is set anew before; None: never.

        It does so even while this process is stopped, tells ``overdue``, and starts nothing until it is set anew.
        """
        self.ask({"kind": "deadline", "at": at})

    def read(self) -> list[frames.Frame] | None:
        """The starter's frames that have arrived; None when it has closed."""
        return _read(self.socket, self._reader)

    def read_guard(self) -> list[frames.Frame] | None:
        """The guard's frames that have arrived; None when it has closed."""
        heard = _read(self.guard_socket, self._guard_reader)
        self._swept = self._swept or any(frame["kind"] == "swept" for frame in heard or ())
        return heard

    def destroy(self) -> None:
        """SIGKILL guard, starter and all below them, even if they are stopped (SIGSTOP) or hang."""
        from .family import kill_everything_below  # noqa: PLC0415  -- psutil, for a case that hardly comes

        kill_everything_below(os.getpid(), self.spared)

    def dismiss(self) -> None:
        """Let both end, the starter at the closing of its socket and then the guard, and wait for it."""
        self.socket.close()
        deadline = now() + DISMISSAL_S
        while (left_s := deadline - now()) > 0 and select.select([self.guard_socket], [], [], left_s)[0]:
            if self.read_guard() is None:
                break
        else:
            self.destroy()
        self.reap()

    def reap(self) -> ExitStatus | None:
        """Collect the guard and return how it ended; if it died with anything left below it, see to that.

        None where it had to be killed.
        """
        self.socket.close()
        self.guard_socket.close()
        status = self._collect()
        if not self._swept:
            self.destroy()
        return status

    def _collect(self) -> ExitStatus | None:
        try:
            return ExitStatus.from_wait(os.waitpid(self._guard_pid, 0)[1])
        except ChildProcessError:
            return None


def _start_frame(spec: JobSpec, method: StartMethod, local_world_size: int) -> frames.Frame:
    return {
        "kind": "start",
        "mode": method.value,
        "command": spec.program.command() if method is StartMethod.WARM else [],
        "environment": alike(local_world_size, spec.parallel, os.environ),
        "preload": list(spec.preload),
        "entry": _entry(spec.parallel),
    }


def _entry(way: Way | None) -> dict[str, object] | None:
    if way in {None, Way.NONE}:
        return None
    return {**_STAND_IN, "preload": [*_STAND_IN["preload"], *(_SHARDING if way is Way.FSDP else ())]}


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
