"""The loop that owns the workers of a node: it starts them when the agent asks, reaps them, and lets nothing escape.

One and the same for both start methods; what differs is how a worker comes into being (birth.py).

[Note: deadline] A node's workers live on a lease, and must be dead when it runs out: another node may have taken their
place. The agent may be stopped (SIGSTOP) at that moment while its workers run, so the starter holds the time itself. At
every wake-up it looks at the clock before it does anything else, and nothing in its loop waits for the agent. Past the
deadline it kills all that is below it, at once. Only a renewal that has arrived already, and was not heard yet, is
heard first. The kernel's timeouts stand still while the host is suspended and the deadline's clock does not, so the
clock is looked at every fifth of a second.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any, NoReturn

from dlaunch.clock import now

from . import family
from .birth import Birth, NotStarted, Request
from .link import AgentLink
from .signals import SignalInbox
from .sweep import Sweep, end_everything_below, take_step

RETRY_S = 0.05  # until what the agent had no room for is offered again
LOOK_AT_CLOCK_S = 0.2  # how late the end of a suspend is noticed, at most
LEASE_RAN_OUT = "its node's lease had run out"


class Starter:
    """Owns the workers. Single-threaded: the workers' tie to their parent is a tie to its thread."""

    def __init__(self, agent: socket.socket, inbox: SignalInbox, birth: Birth) -> None:
        self._agent = AgentLink(agent)
        self._inbox = inbox
        self._birth = birth
        self._ids: dict[int, int] = {}  # what was asked for and is not reaped yet: process id to the agent's id
        self._stores: set[int] = set()
        self._sweep: Sweep | None = None
        self._sweep_was_asked_for = False
        self._look_again_s: float | None = None
        self._deadline: float | None = None  # on dlaunch's clock; see [Note: deadline]
        self._was_enforced = False

    def serve(self) -> Request:
        """Do as the agent says until it goes. Returns only in a child: the request that it is the worker of."""
        self._inbox.watch(self._agent.fileno())
        while True:
            readable, signals = self._inbox.wait(self._timeout_s())
            self._keep_deadline()
            if signal.SIGTERM in signals:
                self._end(128 + signal.SIGTERM)
            if signal.SIGCHLD in signals:
                self._reap()
            if readable and (request := self._hear()) and self._answer(request):
                return request
            self._go_on_sweeping()
            self._agent.flush()

    def _timeout_s(self) -> float | None:
        """Until something is to be done although nothing happens."""
        times = [self._look_again_s] if self._look_again_s is not None else []
        if self._agent.has_unsent:
            times.append(RETRY_S)
        if self._deadline is not None and not self._was_enforced:
            times.append(min(LOOK_AT_CLOCK_S, max(0.0, self._deadline - now())))
        return min(times, default=None)

    # --- requests ------------------------------------------------------------------------------------------------

    def _hear(self) -> Request | None:
        """The next request, if one has arrived. Does not return when the agent has gone."""
        try:
            return self._agent.receive()
        except EOFError:
            self._end(0)

    def _answer(self, request: Request) -> bool:
        """Do what is asked. True in the child that is the worker that was asked for."""
        if self._handle(request):
            return True
        for fd in request.fds:
            os.close(fd)
        return False

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
                self._sweep_was_asked_for = True
                self._begin_sweep(frame["gentle_s"])
            case "deadline":
                self._deadline = frame["at"]
                self._was_enforced = False
        return False

    def _bear(self, request: Request) -> bool:
        process_id = request.frame["id"]
        is_store = request.frame["kind"] == "serve_store"
        if self._is_past() or self._is_clearing():
            self._tell("not_started", id=process_id, error=LEASE_RAN_OUT, overdue=True)
            return False
        try:
            pid = self._birth.store(request) if is_store else self._birth.worker(request, self._keep_deadline)
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

    # --- the deadline --------------------------------------------------------------------------------------------

    def _is_past(self) -> bool:
        return self._deadline is not None and now() >= self._deadline

    def _is_clearing(self) -> bool:
        """Whether what the deadline ended is not all gone yet: what was started now would be swept with it."""
        return self._sweep is not None and not self._sweep_was_asked_for

    def _keep_deadline(self) -> None:
        if self._was_enforced:
            return
        while self._is_past() and (request := self._hear()):  # a renewal may wait; nothing is started here
            self._answer(request)
        if self._is_past():
            self._enforce_deadline()

    def _enforce_deadline(self) -> None:
        """SIGKILL all that is below, and tell the agent, before it hears of the ends that are due to this."""
        self._was_enforced = True
        self._reap()  # what ended by itself is told as such
        for pid in self._ids:
            family.send(pid, signal.SIGKILL)
        sweep = self._begin_sweep(0.0)
        self._look_again_s = take_step(sweep)
        self._tell("overdue", at=now(), deadline=self._deadline)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        for pid, status in family.reap():
            self._stores.discard(pid)
            if (process_id := self._ids.pop(pid, None)) is not None:
                self._tell("exited", id=process_id, status=status, at=now())

    def _begin_sweep(self, gentle_s: float) -> Sweep:
        for pid in self._stores:
            family.send(pid, signal.SIGKILL)
        if self._sweep is None:
            self._sweep = Sweep(gentle_s, now(), ours=self._stores)
        elif gentle_s == 0:
            self._sweep.hurry()
        return self._sweep

    def _go_on_sweeping(self) -> None:
        if self._sweep is None:
            return
        if family.has_children():
            self._look_again_s = take_step(self._sweep)
            return
        if self._sweep_was_asked_for:
            self._tell("swept", killed=list(self._sweep.killed.items()))
        self._sweep = self._look_again_s = None
        self._sweep_was_asked_for = False

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
        self._agent.tell({"kind": kind, **fields})
