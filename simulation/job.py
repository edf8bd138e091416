"""The training that the workers do together: it goes on while a whole world runs, and is done at some time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from dlaunch.outcome import ExceptionInfo, ExitStatus

from .clock import Due, Scheduler

if TYPE_CHECKING:
    from .network import Network
    from .starter import Worker
    from .weather import Weather

AGAIN_S = 0.25  # until a stalled world is looked at again
LOST_S = 0.5  # of progress since the last checkpoint, when a world ends
LAST_STEP_S = 0.1  # how far apart workers end
LOST_PEER = ExceptionInfo("RuntimeError", "Connection closed by peer")


class WholeWorld(NamedTuple):
    """A world that came together as a whole."""

    round: int
    size: int
    at: float


class Job:
    """What is to be done, and how much of it is."""

    def __init__(
        self, scheduler: Scheduler, dice: random.Random, weather: Weather, network: Network, needed_s: float
    ) -> None:
        self.scheduler, self.dice, self.weather, self.network = scheduler, dice, weather, network
        self.needed_s = needed_s
        self.done_s = 0.0
        self.worlds: dict[int, World] = {}  # by the port at which it meets: after a restore there may be two of a round
        self.whole: list[WholeWorld] = []

    def worker_started(self, worker: Worker) -> None:
        """A worker joins the world of its round."""
        port = worker.assignment.meeting_port
        world = self.worlds.get(port)
        if world is None:
            world = self.worlds[port] = World(self, worker.assignment.world_size)
        world.add(worker)

    def worker_ended(self, worker: Worker) -> None:
        """A worker leaves it, however it ended."""
        self.worlds[worker.assignment.meeting_port].remove(worker)


class World:
    """The workers of one round."""

    def __init__(self, job: Job, size: int) -> None:
        self.size = size
        self.running: dict[int, Worker] = {}  # by rank
        self.whole_at: float | None = None
        self._job = job
        self._finish: Due | None = None
        self._is_broken = self._is_done = False

    def add(self, worker: Worker) -> None:
        """A worker has started."""
        job = self._job
        self.running[worker.rank] = worker
        if len(self.running) == self.size and not self._is_broken:
            self.whole_at = job.scheduler.now
            job.whole.append(WholeWorld(worker.assignment.round, self.size, self.whole_at))
            self._finish = job.scheduler.after(max(0.01, job.needed_s - job.done_s), self._done)

    def remove(self, worker: Worker) -> None:
        """A worker has ended: the others are done too, or have lost a peer."""
        self.running.pop(worker.rank, None)
        if self._is_done or self._is_broken:
            return
        self._is_broken = True
        job = self._job
        if self._finish is not None:
            self._finish.cancel()
        if self.whole_at is not None:
            job.done_s += max(0.0, job.scheduler.now - self.whole_at - LOST_S)
            self.whole_at = None
        for other in tuple(self.running.values()):
            if job.dice.random() < job.weather.victim_fails:
                job.scheduler.after(job.weather.victim.draw(job.dice), other.fail, ExitStatus(code=1), LOST_PEER)

    def _done(self) -> None:
        job = self._job
        workers = tuple(self.running.values())
        hosts = {worker.starter.host.index for worker in workers}
        if any(worker.is_stalled for worker in workers) or job.network.any_cut_among(hosts):
            self._finish = job.scheduler.after(AGAIN_S, self._done)
            return
        self._is_done, self.whole_at = True, None
        job.done_s = job.needed_s
        for worker in workers:
            job.scheduler.after(LAST_STEP_S * job.dice.random(), worker.succeed)
