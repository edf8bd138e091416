"""The starter of a node and its workers, as the agent meets them: they take their time, fail, and heed no signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlaunch.agent.events import (
    StarterLost,
    StarterOverdue,
    StarterReady,
    Swept,
    WorkerExited,
    WorkerFailing,
    WorkerNotStarted,
    WorkerStarted,
)
from dlaunch.outcome import ExceptionInfo, ExitStatus
from dlaunch.rendezvous.values import Assignment

from .clock import Due

if TYPE_CHECKING:
    from .node import Agent, Host

PIPE_S = (0.0001, 0.001)  # between an agent and its starter
KILLED = ExitStatus(signal=signal.SIGKILL)
OK = ExitStatus(code=0)
NO_DEADLINE = float("inf")


class Worker:
    """One worker process."""

    __slots__ = (
        "assignment",
        "excused",
        "is_stalled",
        "lives",
        "local_rank",
        "node_id",
        "pid",
        "rank",
        "started_at",
        "starter",
        "stubborn",
    )

    def __init__(self, starter: Starter, assignment: Assignment, local_rank: int, pid: int) -> None:
        self.starter, self.assignment, self.local_rank, self.pid = starter, assignment, local_rank, pid
        self.rank = assignment.base_rank + local_rank
        self.node_id = starter.agent.node_id
        self.started_at = starter.host.scheduler.now
        self.lives = True
        self.is_stalled = False  # it makes no progress, and so nobody does
        self.excused = False  # its whole host was frozen past the deadline: it may run until its starter has looked
        cluster = starter.host.cluster
        self.stubborn = cluster.dice.random() < cluster.weather.stubborn

    def end(self, status: ExitStatus, exception: ExceptionInfo | None = None) -> None:
        """It is reaped."""
        if not self.lives:
            return
        self.lives = False
        starter = self.starter
        starter.workers.pop(self.local_rank, None)
        starter.host.cluster.worker_ended(self, status)
        at = starter.host.shows()
        starter.tell(
            WorkerExited(
                self.local_rank, status, at, exception, failed_at=at if exception else None, finalized=bool(exception)
            )
        )

    def succeed(self) -> None:
        """Its script comes to its end."""
        self.starter.host.when_running(self._go_on, OK, None)

    def fail(self, status: ExitStatus, exception: ExceptionInfo | None = None) -> None:
        """It fails of itself."""
        self.starter.host.when_running(self._go_on, status, exception)

    def _go_on(self, status: ExitStatus, exception: ExceptionInfo | None) -> None:
        if not self.lives:
            return
        host = self.starter.host
        if not status.ok:
            host.cluster.worker_failed(self, status)
        if exception is not None and host.cluster.dice.random() < 0.7:
            self.starter.tell(WorkerFailing(self.local_rank))
            host.scheduler.after(0.3 * host.cluster.dice.random(), host.when_running, self.end, status, exception)
        else:
            self.end(status, exception)

    def take_signal(self, signum: int) -> None:
        """It is asked to end."""
        cluster = self.starter.host.cluster
        if signum == signal.SIGKILL:
            self.end(KILLED)
        elif not self.stubborn:
            delay_s = cluster.weather.stop.draw(cluster.dice)
            cluster.scheduler.after(delay_s, self.starter.host.when_running, self.end, ExitStatus(signal=signum))


class Starter:
    """One starter, with its guard: single-threaded, it does what it is told in turn."""

    def __init__(self, host: Host, agent: Agent) -> None:
        self.host, self.agent = host, agent
        self.workers: dict[int, Worker] = {}  # that live, by local rank
        self.lives = True
        self.deadline = NO_DEADLINE  # on the host's clock
        self._free_at = 0.0
        self._look: Due | None = None
        cluster = host.cluster
        cluster.scheduler.after(cluster.weather.starter_ready.draw(cluster.dice), host.when_running, self._ready)

    def _ready(self) -> None:
        if self.lives:
            self.tell(StarterReady(self.host.next_pid()))

    def tell(self, event: Any) -> None:
        """A frame for the agent."""
        if self.lives and self.agent.starter is self:
            self.agent.deliver(event)

    def post(self, call: Callable[..., object], *arguments: Any, takes_s: float = 0.0) -> None:
        """A frame from the agent, which is done when those before it are."""
        cluster = self.host.cluster
        now = cluster.scheduler.now
        self._free_at = max(now + cluster.dice.uniform(*PIPE_S), self._free_at) + takes_s
        cluster.scheduler.at(self._free_at, self._do, call, arguments)

    def _do(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self.host.is_frozen:
            self.host.when_running(self._do, call, arguments)
        elif self.lives:
            call(*arguments)

    # --- what it can be asked for --------------------------------------------------------------------------------

    def spawn(self, assignment: Assignment) -> None:
        """Start this node's workers of a round, one after the other."""
        cluster = self.host.cluster
        for local_rank in range(assignment.local_world_size):
            self.post(self._bear, assignment, local_rank, takes_s=cluster.weather.spawn.draw(cluster.dice))

    def _bear(self, assignment: Assignment, local_rank: int) -> None:
        if self.is_past_deadline():
            self.tell(StarterOverdue())
            self.tell(WorkerNotStarted(local_rank, "the deadline has passed", self.host.shows()))
            return
        worker = Worker(self, assignment, local_rank, self.host.next_pid())
        self.workers[local_rank] = worker
        self.host.cluster.worker_started(worker)
        self.tell(WorkerStarted(local_rank, worker.pid, self.host.shows()))

    def signal(self, local_ranks: tuple[int, ...], signum: int) -> None:
        """Send a signal to workers."""
        for local_rank in local_ranks:
            if worker := self.workers.get(local_rank):
                worker.take_signal(signum)

    def sweep(self) -> None:
        """Leave nothing of the workers."""
        for worker in tuple(self.workers.values()):
            worker.end(KILLED)
        cluster = self.host.cluster
        self.post(self.tell, Swept(()), takes_s=cluster.weather.sweep.draw(cluster.dice))

    # --- the deadline --------------------------------------------------------------------------------------------

    def is_past_deadline(self) -> bool:
        """Whether nothing may run here now."""
        return self.host.shows() >= self.deadline

    def set_deadline(self, at: float) -> None:
        """Kill the workers at this time on the host's clock, unless it is set anew before."""
        self.deadline = at
        true = self.host.clock.true(at)
        if self._look is None or self._look.call is None or self._look.at > true:
            if self._look is not None:
                self._look.cancel()
            self._look = self.host.scheduler.at(true, self.look_at_deadline)

    def look_at_deadline(self) -> None:
        """Kill the workers if it is time to."""
        if not self.lives or self.host.is_frozen:
            return  # the host looks when it runs again
        self._look = None
        if self.is_past_deadline():
            if self.workers:
                self.host.cluster.story.tell(self.host.name, "the starter kills its workers: the deadline has passed")
                self.tell(StarterOverdue())
            self.kill_all()
        else:
            self._look = self.host.scheduler.at(self.host.clock.true(self.deadline) + 1e-9, self.look_at_deadline)

    # --- ends ----------------------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """No worker lives."""
        for worker in tuple(self.workers.values()):
            worker.end(KILLED)

    def die(self, told: bool = True) -> None:
        """The starter is gone, and all that was below it."""
        if not self.lives:
            return
        self.lives = False  # so nobody tells of what the guard kills
        self.kill_all()
        if self._look is not None:
            self._look.cancel()
        if told and self.agent.starter is self:
            self.agent.deliver(StarterLost(KILLED))
