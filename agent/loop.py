"""The agent's shell: turns what happens into events for the machine, and performs the actions that it returns."""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from dlaunch import frames
from dlaunch.clock import now
from dlaunch.errors import ConfigurationError
from dlaunch.outcome import ExceptionInfo, ExitStatus, Outcome
from dlaunch.spec import JobSpec, StartMethod

from .actions import (
    Abandon,
    CancelTimer,
    DestroyStarter,
    Finish,
    ForwardSignal,
    GiveUp,
    KillWorkers,
    Say,
    SetTimer,
    SignalWorkers,
    SpawnGroup,
    StartStarter,
    Sweep,
)
from .channel import exception_from_file
from .console import Console
from .events import (
    Begin,
    SignalArrived,
    StarterLost,
    StarterOverdue,
    StarterReady,
    StarterRefused,
    StoreExited,
    Swept,
    TimerFired,
    WorkerExited,
    WorkerFailing,
    WorkerNotStarted,
    WorkerStarted,
)
from .family import handles
from .group import Worker, WorkerGroup
from .layout import RunDirectory
from .oom import oom_kills
from .pump import OutputPump
from .record import RunRecord
from .signals import SignalSource
from .starter import Starter
from .writer import FileWriter

LONGEST_WAIT_S = 3600.0  # a longer one is waited in parts: epoll knows no more than 24 days
LAST_LINES = 20  # of a failed worker's output, kept for the report


class Handles(Protocol):
    """The decisions that a loop carries out: pure."""

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """What to do about an event, in order."""


class Loop:
    """One run on one node, from Begin to Finish. Single-threaded."""

    def __init__(
        self,
        spec: JobSpec,
        local_world_size: int,
        console: Console,
        machine: Handles,
        directory: RunDirectory,
        record: RunRecord,
        first_starter: Starter,
        writer: FileWriter,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self._spec = spec
        self._size = local_world_size
        self._console = console
        self._machine = machine
        self._directory = directory
        self._record = record
        self._selector: selectors.BaseSelector = selector or selectors.DefaultSelector()
        self._pump = OutputPump(spec.output, console, self._selector, writer)
        self._events: deque[Any] = deque()
        self._timers: dict[str, float] = {}
        self._first_starter: Starter | None = first_starter
        self._starter: Starter | None = None
        self._starter_serves_store = False
        self._starter_status: ExitStatus | None = None
        self._group: WorkerGroup | None = None
        self._next_id = 0
        self._oom_kills: int | None = None
        self._late_variables: set[str] = set()
        self._outcome: Outcome | None = None

    def run(self, signals: SignalSource) -> Outcome:
        """Run the job to its end; nothing of it lives when this returns or raises."""
        self._watch(signals.socket, lambda _fd: self._events.extend(SignalArrived(n) for n in signals.read()))
        self._events.append(Begin())
        try:
            while self._outcome is None:
                self._handle_events()
                if self._outcome is None:
                    self._wait()
            return self._outcome
        finally:
            self._end_starter()
            self._close_group()
            self._pump.close_all()  # the files are complete before anybody tells of them
            self._release()
            self._selector.close()

    def _release(self) -> None:
        """Let go of what else is held, once nothing of the run lives."""

    # --- the queue -----------------------------------------------------------------------------------------------

    def _handle_events(self) -> None:
        while self._events and self._outcome is None:
            event = self._events.popleft()
            if isinstance(event, Swept | StarterLost):
                self._close_group()  # nothing of the attempt is left that could write
            for action in self._machine.handle(event, now()):
                self._perform(action)

    def _wait(self) -> None:
        for key, _mask in self._selector.select(self._timeout()):
            if self._selector.get_map().get(key.fd) is key:  # what was heard before may have ended this one
                heard: Callable[[int], object] = key.data
                heard(key.fd)
        if (due_at := self._pump.due_at) is not None and due_at <= now():
            self._pump.show_updates()
        for name, at in sorted(self._timers.items(), key=lambda item: item[1]):
            if at <= now():
                del self._timers[name]
                self._events.append(self._timer_event(name))

    def _timer_event(self, name: str) -> Any:
        return TimerFired(name)

    def _timeout(self) -> float | None:
        times = [*self._timers.values(), *self._other_times()]
        return min(max(0.0, min(times) - now()), LONGEST_WAIT_S) if times else None

    def _other_times(self) -> list[float]:
        """When something of ours that is no timer wants to be looked at."""
        return [self._pump.due_at] if self._pump.due_at is not None else []

    def _watch(self, sock: socket.socket, heard: Callable[[int], object]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, heard)

    def _unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)

    # --- actions -------------------------------------------------------------------------------------------------

    def _perform(self, action: Any) -> None:  # noqa: PLR0912  -- one case for each action
        match action:
            case StartStarter(method):
                self._start_starter(method)
            case SpawnGroup():
                self._spawn_group(action)
            case SignalWorkers(signum, local_ranks):
                self._ask_for(local_ranks, "signal", signal=int(signum))
            case ForwardSignal(signum, local_ranks):
                self._forward(signum, local_ranks)
            case KillWorkers(local_ranks):
                self._ask_for(local_ranks, "kill")
            case Sweep(gentle_s):
                self._ask("sweep", gentle_s=gentle_s)
            case DestroyStarter():
                if self._starter:
                    self._starter.destroy()
            case SetTimer(name, at):
                self._timers[name] = at
            case CancelTimer(name):
                self._timers.pop(name, None)
            case Say(text):
                self._console.notice(text)
            case Abandon(sentence, fix):
                raise ConfigurationError(sentence, fix)
            case GiveUp(error):
                raise error
            case Finish(outcome):
                self._outcome = outcome
            case _:
                raise AssertionError(f"an action that is not for this loop: {action!r}")

    def _start_starter(self, method: StartMethod) -> None:
        self._end_starter()
        self._starter_status = None
        self._next_id = 0
        self._starter = starter = self._first_starter or Starter(self._spec, method, self._size)
        self._first_starter = None
        self._watch(starter.socket, self._hear_starter)
        self._watch(starter.guard_socket, self._hear_guard)

    def _spawn_group(self, action: SpawnGroup) -> None:
        starter = self._starter
        assert starter
        self._close_group()
        self._oom_kills = oom_kills()
        self._group = group = self._new_group(action, starter)
        self._next_id = group.next_id
        for worker in group.spawn(starter, self._directory, self._pump):
            self._watch(worker.channel.socket, partial(self._hear_worker, worker))

    def _new_group(self, action: SpawnGroup, starter: Starter) -> WorkerGroup:
        """The workers that are to be started, with the place where they meet."""
        group = WorkerGroup(self._spec, self._size, action.attempt, action.attempt, self._next_id)
        group.open_meeting(starter, starter_serves=self._starter_serves_store)
        self._record.attempt_started(action.attempt)
        return group

    def _ask(self, kind: str, **fields: object) -> None:
        if self._starter:
            self._starter.ask({"kind": kind, **fields})

    def _ask_for(self, local_ranks: tuple[int, ...], kind: str, **fields: object) -> None:
        for local_rank in local_ranks:
            if self._group and local_rank in self._group.workers:
                self._ask(kind, id=self._group.workers[local_rank].id, **fields)

    def _forward(self, signum: int, local_ranks: tuple[int, ...]) -> None:
        workers = [self._group.workers[n] for n in local_ranks] if self._group else []
        ready = [worker for worker in workers if worker.pid and handles(worker.pid, signum)]
        self._ask_for(tuple(worker.place.local_rank for worker in ready), "signal", signal=int(signum))
        if len(ready) < len(workers):
            left_out = ", ".join(str(worker.place.rank) for worker in workers if worker not in ready)
            name = signal.Signals(signum).name
            self._console.notice(f"{name} was not passed to rank {left_out}: no handler there, it would end the job")

    # --- what is heard -------------------------------------------------------------------------------------------

    def _hear_starter(self, _fd: int) -> None:
        assert self._starter
        heard = self._starter.read()
        for frame in heard or ():
            self._on_starter_frame(frame)
        if heard is None:
            self._unwatch(self._starter.socket)

    def _on_starter_frame(self, frame: frames.Frame) -> None:
        kind = frame["kind"]
        if kind == "ready":
            self._starter_serves_store = frame["serves_store"]
            self._record.starter_ready(frame["pid"])
            self._events.append(StarterReady(frame["pid"]))
        elif kind == "refused":
            self._events.append(StarterRefused(frame["reason"], frame["asked"]))
        elif kind == "overdue":
            self._events.append(StarterOverdue())
        elif kind == "swept":
            self._events.append(Swept(tuple((pid, name) for pid, name in frame["killed"])))
        elif kind == "not_started" and frame.get("overdue"):
            self._events.append(StarterOverdue())  # nobody's failure: it came too late to be started
            if worker := self._group and self._group.by_id(frame["id"]):
                self._on_worker_frame(worker, frame)
        elif self._group and frame.get("id") == self._group.store_id:
            if kind == "exited":
                self._events.append(StoreExited(ExitStatus.from_wait(frame["status"]), frame["at"]))
            elif kind == "not_started":
                self._events.append(StoreExited(None, now()))
        elif self._group and (worker := self._group.by_id(frame.get("id", -1))):
            self._on_worker_frame(worker, frame)

    def _on_worker_frame(self, worker: Worker, frame: frames.Frame) -> None:
        local_rank = worker.place.local_rank
        if frame["kind"] == "started":
            worker.pid = frame["pid"]
            self._record.worker_started(worker.place.rank, frame["pid"])
            self._events.append(WorkerStarted(local_rank, frame["pid"], frame["at"]))
        elif frame["kind"] == "not_started":
            self._events.append(WorkerNotStarted(local_rank, frame["error"], now()))
        elif frame["kind"] == "exited":
            self._events.append(self._worker_exited(worker, ExitStatus.from_wait(frame["status"]), frame["at"]))

    def _worker_exited(self, worker: Worker, status: ExitStatus, at: float) -> WorkerExited:
        """All that is known of a worker's end: what it said, wrote and printed is read to its last byte."""
        local_rank = worker.place.local_rank
        worker.channel.read()
        self._pump.drain(local_rank)
        if status.ok:
            self._note_late_variables(worker)
            return WorkerExited(local_rank, status, at, finalized=worker.channel.finalized)
        log_file = worker.files.stderr or worker.files.stdout
        return WorkerExited(
            local_rank,
            status,
            at,
            exception=self._exception(worker, status),
            failed_at=worker.channel.failed_at,
            finalized=worker.channel.finalized,
            oom_killed=status.signal == signal.SIGKILL and self._oom_struck(),
            last_output=self._pump.tail(local_rank, LAST_LINES),
            log_file=str(log_file) if log_file else None,
        )

    def _exception(self, worker: Worker, status: ExitStatus) -> ExceptionInfo | None:
        """What the worker said, where its exit status bears it out: an uncaught exception ends in 1 or in a signal."""
        if status.code not in {1, None}:
            return None
        return worker.channel.exception or exception_from_file(worker.files.error)

    def _oom_struck(self) -> bool:
        count = oom_kills()
        return count is not None and self._oom_kills is not None and count > self._oom_kills

    def _note_late_variables(self, worker: Worker) -> None:
        new = sorted(set(worker.channel.late_variables) - self._late_variables)
        if new and self._starter and self._starter.method is StartMethod.WARM:
            self._late_variables.update(new)
            self._console.notice(
                f"the script set {', '.join(new)} itself: too late under the warm start, which had torch imported. "
                "Set it before dlaunch, or use --start-method exec."
            )

    def _hear_worker(self, worker: Worker, _fd: int) -> None:
        known = worker.channel.failing
        if not worker.channel.read():
            self._unwatch(worker.channel.socket)
        if worker.channel.failing and not known:
            self._events.append(WorkerFailing(worker.place.local_rank))

    def _hear_guard(self, _fd: int) -> None:
        starter = self._starter
        assert starter
        heard = starter.read_guard()
        for frame in heard or ():
            if frame["kind"] == "starter_exited":
                self._starter_status = ExitStatus.from_wait(frame["status"])
        if heard is None:
            self._hear_last_words(starter)
            self._release_starter()
            guard_status = starter.reap()
            self._events.append(StarterLost(self._starter_status or guard_status))

    def _hear_last_words(self, starter: Starter) -> None:
        """Take in what the starter said before it died: a worker's end must not be lost behind the starter's."""
        while heard := starter.read():
            for frame in heard:
                self._on_starter_frame(frame)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _end_starter(self) -> None:
        """Let the starter and its guard end, and wait for it."""
        if starter := self._release_starter():
            starter.dismiss()

    def _release_starter(self) -> Starter | None:
        """Watch the starter no longer; returns it, if there is one."""
        starter, self._starter = self._starter, None
        if starter:
            self._unwatch(starter.socket)
            self._unwatch(starter.guard_socket)
        return starter

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for worker in group.workers.values():
            self._unwatch(worker.channel.socket)
        group.close()
        self._pump.close_all(wait_s=0)
