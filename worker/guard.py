"""The guard: parent of the starter, and the last one standing when agent and starter are killed at once.

A script, run by path with ``python -I -S guard.py <descriptor of the socket to the agent>``. It hears one frame (what
to start, and the starter's own socket), then waits for one of two ends: the starter's, which it tells, or the agent's.
After either it kills all that is left below it, says so, and exits. It adopts whatever loses its parent below it.

Meanwhile the agent may give it sockets to hold: a duplicate of the one on which the agent listens for its peers. While
the guard lives, a connection to that address is not refused; so its refusal proves that nothing on this node is left.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, NoReturn

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100,PTH120
sys.path.insert(0, _ROOT)
import dlaunch  # noqa: E402,F401  -- from now on its submodules are found through it

sys.path.remove(_ROOT)

from dlaunch import frames  # noqa: E402
from dlaunch.worker import family, hooked  # noqa: E402
from dlaunch.worker.birth import fork, give_up  # noqa: E402
from dlaunch.worker.lineage import adopt_orphans, die_with_parent, lead_session  # noqa: E402
from dlaunch.worker.program import ProgramBirth, why_not_executed  # noqa: E402
from dlaunch.worker.signals import SignalInbox, unignore_for_exec  # noqa: E402
from dlaunch.worker.starter import Starter  # noqa: E402
from dlaunch.worker.sweep import ask_to_end, end_everything_below  # noqa: E402

STARTER_PATIENCE_S = 2.0  # for a starter to end by itself; one that does not, hangs or is stopped


class Guard:
    """Starts the starter, and sees to it that nothing below it outlives it or the agent."""

    def __init__(self, agent: socket.socket, inbox: SignalInbox) -> None:
        self._agent = agent
        self._inbox = inbox
        self._starter = 0
        self._held: list[int] = []  # descriptors that only the end of this process closes

    def run(self) -> None:
        """From the first frame to the last."""
        received = frames.receive_if_any(self._agent)
        if received is None:
            return
        frame, (starter_socket,) = received
        self._starter = self._start(frame, starter_socket)
        os.close(starter_socket)
        self._tell("starter_started", pid=self._starter)
        self._wait_for_an_end()
        self._inbox.forget(self._agent.fileno())
        # The starter first: it kills all below it and blames no worker for that; and it goes on if we are killed. One
        # that was killed by us before its workers would leave nobody to do that.
        ask_to_end(self._inbox, lambda: self._starter, self._reap, STARTER_PATIENCE_S)
        end_everything_below(self._inbox, self._reap, last=[self._starter])
        self._tell("swept")

    def _wait_for_an_end(self) -> None:
        self._inbox.watch(self._agent.fileno())
        while self._starter:
            readable, signals = self._inbox.wait(None)
            self._reap()
            if signal.SIGTERM in signals or (readable and not self._hear_agent()):
                return

    def _hear_agent(self) -> bool:
        """Hear one frame: the agent has something to be held. False when it has gone."""
        received = frames.receive_if_any(self._agent)
        if received is None:
            return False
        self._held += received[1]
        return True

    def _reap(self) -> None:
        for pid, status in family.reap():
            if pid == self._starter:
                self._starter = 0
                self._tell("starter_exited", status=status)

    def _start(self, frame: frames.Frame, starter_socket: int) -> int:
        pid = fork(self._inbox, tie=signal.SIGTERM)
        if pid == 0:
            self._become_starter(frame, starter_socket)
        return pid

    def _become_starter(self, frame: frames.Frame, starter_socket: int) -> NoReturn:
        try:
            self._agent.close()  # with all that waits in it: what is to be held arrives only in the guard
            os.environ.update(frame["environment"])
            if frame["mode"] == "warm":
                _become_interpreter(frame, starter_socket)
            _serve(frame, socket.socket(fileno=starter_socket))
        except BaseException as error:
            give_up(error)

    def _tell(self, kind: str, **fields: Any) -> None:
        frames.tell(self._agent, {"kind": kind, **fields})


def main() -> None:
    """Run a guard on the socket that the first argument names."""
    agent = socket.socket(fileno=int(sys.argv[1]))
    agent.set_inheritable(False)
    inbox = SignalInbox()
    inbox.listen()
    lead_session()
    adopt_orphans()
    die_with_parent(signal.SIGTERM, os.getppid())
    Guard(agent, inbox).run()


def _become_interpreter(frame: frames.Frame, starter_socket: int) -> NoReturn:
    """Go on as the user's interpreter on the user's script; our hook parks it before the first line (bootstrap.py)."""
    os.set_inheritable(starter_socket, True)
    private = {hooked.AGENT: str(starter_socket), hooked.PRELOAD: ",".join(frame["preload"])}
    if frame.get("defaults", True):
        private[hooked.TORCH] = "1"
    if entry := frame.get("entry"):
        private |= {hooked.ENTRY: entry["call"], hooked.ENTRY_PRELOAD: ",".join(entry["preload"])}
    unignore_for_exec()
    command = frame["command"]
    try:
        os.execvpe(command[0], command, hooked.hooked(os.environ, private))
    except OSError as error:
        reason = why_not_executed(command[0], error)
    with socket.socket(fileno=starter_socket) as agent:
        frames.tell(agent, {"kind": "refused", "reason": reason, "module": None, "asked": False})
    os._exit(0)


def _serve(frame: frames.Frame, agent: socket.socket) -> NoReturn:
    """Be the starter of programs: this very process, so that no second interpreter has to start."""
    inbox = SignalInbox()
    inbox.listen()
    adopt_orphans()
    ready = {"preloaded": [], "serves_store": False, "seconds": 0.0}
    frames.tell(agent, {"kind": "ready", "pid": os.getpid(), **ready})
    Starter(agent, inbox, ProgramBirth(inbox, entry["call"] if (entry := frame.get("entry")) else "")).serve()
    raise AssertionError("a starter of programs has no child that returns")


if __name__ == "__main__":
    main()
