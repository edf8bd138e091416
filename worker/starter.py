"""The loop that owns the workers of a node: it starts them when the agent asks, reaps them, and lets nothing escape.

One and the same for both start methods; what differs is how a worker comes into being (birth.py).
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any, NoReturn

from dlaunch import frames
from dlaunch.clock import now

from . import family
from .birth import Birth, NotStarted, Request
from .signals import SignalInbox
from .sweep import Sweep, end_everything_below, take_step


class Starter:
    """Owns the workers. Single-threaded: the workers' tie to their parent is a tie to its thread."""

    def __init__(self, agent: socket.socket, inbox: SignalInbox, birth: Birth) -> None:
        self._agent = agent
        self._inbox = inbox
        self._birth = birth
        self._ids: dict[int, int] = {}  # what was asked for and is not reaped yet: process id to the agent's id
        self._stores: set[int] = set()
        self._sweep: Sweep | None = None
        self._look_again_s: float | None = None

    def serve(self) -> Request:
        """Do as the agent says until it goes. Returns only in a child: the request that it is the worker of."""
        self._inbox.watch(self._agent.fileno())
        while True:
            readable, signals = self._inbox.wait(self._look_again_s)
            if signal.SIGTERM in signals:
                self._end(128 + signal.SIGTERM)
            if signal.SIGCHLD in signals:
                self._reap()
            if readable and (request := self._listen()):
                return request
            self._go_on_sweeping()

    def _listen(self) -> Request | None:
        """Hear and handle one request; returns it in the child that is its worker."""
        try:
            received = frames.receive(self._agent)
        except (OSError, frames.FrameError):
            received = None
        if received is None:
            self._end(0)
        request = Request(*received)
        if self._handle(request):
            return request
        for fd in request.fds:
            os.close(fd)
        return None

    def _handle(self, request: Request) -> bool:
        frame = request.frame
        match frame["kind"]:
            case "spawn" | "serve_store":
                return self._bear(request)
            case "signal":
                for pid in self._pids_of(frame["id"]):
                    family.send(pid, frame["signal"])
            case "kill":
                for pid in self._pids_of(frame["id"]):
                    family.kill_session(pid)
            case "sweep":
                self._begin_sweep(frame["gentle_s"])
        return False

    def _bear(self, request: Request) -> bool:
        process_id = request.frame["id"]
        is_store = request.frame["kind"] == "serve_store"
        try:
            pid = self._birth.store(request) if is_store else self._birth.worker(request)
        except NotStarted as reason:
            self._tell("not_started", id=process_id, error=str(reason))
            return False
        if pid == 0:
            return True
        self._ids[pid] = process_id
        if is_store:
            self._stores.add(pid)
        self._tell("started", id=process_id, pid=pid, at=now())
        return False

    def _reap(self) -> None:
        for pid, status in family.reap():
            self._stores.discard(pid)
            if (process_id := self._ids.pop(pid, None)) is not None:
                self._tell("exited", id=process_id, status=status, at=now())

    def _begin_sweep(self, gentle_s: float) -> None:
        for pid in self._stores:
            family.send(pid, signal.SIGKILL)
        if self._sweep is None:
            self._sweep = Sweep(gentle_s, now(), ours=self._stores)
        elif gentle_s == 0:
            self._sweep.hurry()

    def _go_on_sweeping(self) -> None:
        if self._sweep is None:
            return
        if family.has_children():
            self._look_again_s = take_step(self._sweep)
            return
        self._tell("swept", killed=list(self._sweep.killed.items()))
        self._sweep = self._look_again_s = None

    def _end(self, code: int) -> NoReturn:
        self._reap()
        self._ids.clear()  # whoever dies from here on was ended by us: that is no failure of a worker to be told
        self._inbox.forget(self._agent.fileno())
        end_everything_below(self._inbox, self._reap)
        os._exit(code)

    def _pids_of(self, process_id: int) -> list[int]:
        """None or one: a process that was reaped is out of reach, so that its number is never another's."""
        return [pid for pid, known in self._ids.items() if known == process_id]

    def _tell(self, kind: str, **fields: Any) -> None:
        frames.tell(self._agent, {"kind": kind, **fields})
