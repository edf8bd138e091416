"""The shell of a node among several: beside the workers it has the store, the peers and the meeting of each round."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from dlaunch.clock import now
from dlaunch.environ import Meeting, World
from dlaunch.outcome import Outcome
from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.store import Store, Watch
from dlaunch.rendezvous.values import Assignment
from dlaunch.spec import JobSpec, StartMethod

from .actions import SpawnGroup
from .console import Console
from .coupling import Coupling
from .group import WorkerGroup
from .interface import gloo_variables
from .layout import RunDirectory
from .loop import Loop
from .meeting import OpenedMeeting, open_meeting
from .peers import Peers
from .record import RunRecord
from .signals import SignalSource
from .starter import Starter
from .writer import FileWriter

Deliver = Callable[[Callable[[], None]], None]

_OF_MEMBER = "run: "  # before the names of the timers of the run's machine


class Inbox:
    """Functions that other threads want called on the loop's thread, in their order."""

    def __init__(self) -> None:
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)
        self._functions: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._rung = False

    def deliver(self, function: Callable[[], None]) -> None:
        """Have it called soon; from any thread."""
        with self._lock:
            self._functions.append(function)
            ring, self._rung = not self._rung, True
        if ring:
            with contextlib.suppress(OSError):  # the loop is gone, and nobody waits any more
                self._bell.send(b"\0")

    def call_all(self) -> None:
        """Call what was delivered; on the loop's thread."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(64)
        with self._lock:
            functions, self._functions = self._functions, deque()
            self._rung = False
        for function in functions:
            function()

    def close(self) -> None:
        """Deliver nothing more."""
        self.socket.close()
        self._bell.close()


class NodeLoop(Loop):
    """One node's part in a run of several, from Begin to Finish."""

    def __init__(
        self,
        spec: JobSpec,
        local_world_size: int,
        console: Console,
        couple: Callable[[str], Coupling],
        directory: RunDirectory,
        record: RunRecord,
        first_starter: Starter,
        writer: FileWriter,
        *,
        address: str,
        open_store: Callable[[Deliver], Store],
        spared: tuple[int, ...],
    ) -> None:
        """``couple`` makes this node's machines, given host:port where it listens for its peers.

        ``address`` is this node's own; ``spared`` are children of this process that are no starter's business.
        """
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(
            self._selector,
            lambda node_id, message: self._events.append(events.PeerSaid(node_id, message)),
            lambda node_id: self._events.append(events.PeerGone(node_id)),
        )
        coupling = couple(self._peers.open(address))
        super().__init__(
            spec, local_world_size, console, coupling, directory, record, first_starter, writer, self._selector
        )
        self._address = address
        self._spared = spared
        self._inbox = Inbox()
        self._store = open_store(self._inbox.deliver)
        self._watches: dict[int, Watch] = {}
        self._meeting: tuple[int, OpenedMeeting] | None = None
        self._deadline: float | None = None

    def run(self, signals: SignalSource) -> Outcome:
        """Run this node's part to the end of the run; nothing of it lives when this returns or raises."""
        self._watch(self._inbox.socket, lambda _fd: self._inbox.call_all())
        return super().run(signals)

    def _release(self) -> None:
        self._store.close()
        self._peers.close()  # only now: from here on the others may take this node for gone
        self._inbox.close()
        self._close_meeting()

    # --- the loop's own ------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        super()._wait()
        if (due_at := self._peers.due_at) is not None and due_at <= now():
            self._peers.tick(now())

    def _other_times(self) -> list[float]:
        return [*super()._other_times(), *([self._peers.due_at] if self._peers.due_at is not None else [])]

    def _timer_event(self, name: str) -> Any:
        if name.startswith(_OF_MEMBER):
            return events.TimerFired(name.removeprefix(_OF_MEMBER))
        return super()._timer_event(name)

    def _perform(self, action: Any) -> None:  # noqa: PLR0912  -- one case for each effect
        match action:
            case effects.Ask(number, request, timeout_s):
                self._store.request(
                    request, timeout_s, lambda answer: self._events.append(events.Answered(number, answer))
                )
            case effects.WatchKeys(number, key, prefix, from_revision):
                self._watches[number] = self._store.watch(
                    key,
                    prefix=prefix,
                    from_revision=from_revision,
                    heard=lambda what: self._events.append(events.WatchHeard(number, what)),
                )
            case effects.Unwatch(number):
                if watch := self._watches.pop(number, None):
                    watch.cancel()
            case effects.SetTimer(name, at):
                self._timers[_OF_MEMBER + name] = at
            case effects.CancelTimer(name):
                self._timers.pop(_OF_MEMBER + name, None)
            case effects.SetToken(token, node_id):
                self._peers.set_identity(token, node_id)
                self._record.registered(node_id)
            case effects.SendPeer(peer, message):
                self._peers.send(peer, message)
            case effects.FollowPeer(peer):
                self._peers.follow(peer)
            case effects.SetDeadline(at):
                self._deadline = at
                if self._starter:
                    self._starter.deadline(at)
            case effects.OpenMeeting(number):
                self._open_meeting(number)
            case _:
                super()._perform(action)

    def _start_starter(self, method: StartMethod) -> None:
        super()._start_starter(method)
        assert self._starter
        self._starter.spared = self._spared
        if self._peers.listener is not None:
            self._starter.hold(self._peers.listener.fileno())  # who cannot be refused may still have live workers
        if self._deadline is not None:
            self._starter.deadline(self._deadline)

    # --- the meeting ---------------------------------------------------------------------------------------------

    def _open_meeting(self, number: int) -> None:
        self._close_meeting()
        opened = open_meeting(self._spec, starter_serves=self._starter_serves_store, address=self._address)
        self._meeting = (number, opened)
        self._events.append(events.MeetingOpened(number, opened.address, opened.port, opened.served))

    def _close_meeting(self) -> None:
        if self._meeting:
            self._meeting[1].close()
            self._meeting = None

    def _new_group(self, action: SpawnGroup, starter: Starter) -> WorkerGroup:
        assignment = action.assignment
        assert assignment
        world = _world(assignment)
        group = WorkerGroup(
            self._spec,
            self._size,
            action.attempt,
            assignment.restart_count,
            self._next_id,
            world=world,
            more_environment=gloo_variables(self._address, os.environ),
        )
        if assignment.group_rank == 0 and self._meeting and self._meeting[0] == assignment.round:
            group.host(starter, self._meeting[1])
            self._meeting = None
        else:
            place = assignment.meeting_address, assignment.meeting_port
            group.meet_at(Meeting(*place, served_by_agent=assignment.meeting_served))
            self._close_meeting()
        self._record.attempt_started(action.attempt, world, assignment.round)
        return group


def _world(assignment: Assignment) -> World:
    return World(
        group_rank=assignment.group_rank,
        group_world_size=assignment.group_world_size,
        base_rank=assignment.base_rank,
        world_size=assignment.world_size,
        role_base_rank=assignment.role_base_rank,
        role_world_size=assignment.role_world_size,
    )
