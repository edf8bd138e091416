"""The keeper: parent of a server that the agent runs for the others of a run, so that nothing of it outlives the agent.

A script, run by path with ``python -I -S keeper.py <descriptor of the socket to the agent>``. It hears one frame (the
command, its environment, the folder for temporary files; with it the descriptor that the server logs to), makes a
private directory in that folder and starts the server there, with a socket on which the server says that it is ready
(sd_notify(3)). It tells ``started``, ``ready`` and ``exited``. When the agent's socket closes it ends the server; in
any case it removes the directory, then exits. If the keeper itself is killed, the kernel kills the server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
from typing import Any, NoReturn

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100,PTH120
sys.path.insert(0, _ROOT)
import dlaunch  # noqa: E402,F401  -- from now on its submodules are found through it

sys.path.remove(_ROOT)

from dlaunch import frames  # noqa: E402
from dlaunch.worker import family  # noqa: E402
from dlaunch.worker.birth import NotStarted, fork, give_up  # noqa: E402
from dlaunch.worker.descriptors import close_all_but  # noqa: E402
from dlaunch.worker.lineage import adopt_orphans  # noqa: E402
from dlaunch.worker.signals import SignalInbox, unignore_for_exec  # noqa: E402
from dlaunch.worker.sweep import ask_to_end, end_everything_below  # noqa: E402

PATIENCE_S = 1.0  # for a server that was asked to end; nothing that it holds is worth more
READY = "ready"  # the name of the socket in the directory
_FREE = 3  # the first descriptor that a program does not expect to be open


class Keeper:
    """Starts the server, and sees to it that it ends with the agent."""

    def __init__(self, agent: socket.socket, inbox: SignalInbox) -> None:
        self._agent = agent
        self._inbox = inbox
        self._server = 0
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def run(self) -> None:
        """From the first frame to the end of the server."""
        received = frames.receive_if_any(self._agent)
        if received is None:
            return
        frame, (log,) = received
        directory = f"{frame['temporary']}/dlaunch-etcd-{secrets.token_hex(8)}"
        os.mkdir(directory, 0o700)  # noqa: PTH102  -- pathlib costs start-up time
        try:
            os.chdir(directory)
            self._notices.bind(READY)
            self._server = self._start(frame, log)
            self._tell("started", directory=directory)
            self._serve()
        except NotStarted as reason:
            self._tell("not_started", reason=str(reason))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _serve(self) -> None:
        """Until the server ends or the agent goes; then nothing of the server is left."""
        heard = (self._agent.fileno(), self._notices.fileno())
        for fd in heard:
            self._inbox.watch(fd)
        while self._server:
            readable, signals = self._inbox.wait(None)
            if self._notices.fileno() in readable and b"READY=1" in self._notices.recv(4096).splitlines():
                self._tell("ready")
            self._reap()
            if signal.SIGTERM in signals or self._agent.fileno() in readable:
                break
        for fd in heard:
            self._inbox.forget(fd)
        ask_to_end(self._inbox, lambda: self._server, self._reap, PATIENCE_S)
        end_everything_below(self._inbox, self._reap)

    def _reap(self) -> None:
        for pid, status in family.reap():
            if pid == self._server:
                self._server = 0
                self._tell("exited", status=status)

    def _start(self, frame: frames.Frame, log: int) -> int:
        pid = fork(self._inbox)
        if pid == 0:  # the name is a relative one: a whole path may be longer than the name of a socket can be
            _become(frame["command"], {**frame["environment"], "NOTIFY_SOCKET": READY}, log)
        os.close(log)
        return pid

    def _tell(self, kind: str, **fields: Any) -> None:
        frames.tell(self._agent, {"kind": kind, **fields})


def _become(command: list[str], environment: dict[str, str], log: int) -> NoReturn:
    try:
        for stream in (1, 2):
            os.dup2(log, stream)
        close_all_but(range(_FREE))
        unignore_for_exec()
        os.execve(command[0], command, environment)
    except BaseException as error:
        give_up(error)


def main() -> None:
    """Run a keeper on the socket that the first argument names."""
    agent = socket.socket(fileno=int(sys.argv[1]))
    agent.set_inheritable(False)
    inbox = SignalInbox()
    inbox.listen()
    adopt_orphans()
    Keeper(agent, inbox).run()


if __name__ == "__main__":
    main()
