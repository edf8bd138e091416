"""The worker group of one attempt: places, files, pipes, channels, environment, and the requests that start it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dlaunch.environ import Meeting, Place, World, worker_environment
from dlaunch.spec import JobSpec, ProgramKind, expand_local_rank

from .channel import WorkerChannel
from .layout import RunDirectory, WorkerFiles
from .meeting import OpenedMeeting, open_meeting
from .pump import OutputPump
from .starter import Starter


@dataclass(slots=True)
class Worker:
    """What the agent holds of one worker process."""

    id: int
    place: Place
    files: WorkerFiles
    channel: WorkerChannel
    pid: int | None = None


class WorkerGroup:
    """This node's workers of one attempt (of one round, where there are several nodes), below one starter.

    ``attempt`` names their log files, ``restart_count`` is what they are told. Before `spawn`, one of `host`,
    `meet_at` and `open_meeting` says where they meet. ``world`` is for a node that is not alone.
    """

    def __init__(
        self,
        spec: JobSpec,
        local_world_size: int,
        attempt: int,
        restart_count: int,
        first_id: int,
        world: World | None = None,
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.store_id = first_id
        self.workers: dict[int, Worker] = {}  # by local rank
        self._spec = spec
        self._size = local_world_size
        self._attempt = attempt
        self._restart_count = restart_count
        self._world = world or World.alone(local_world_size)
        self._more_environment = more_environment or {}
        self._meeting: Meeting

    @property
    def next_id(self) -> int:
        """The first id that this group has not used."""
        return self.store_id + 1 + self._size

    def by_id(self, process_id: int) -> Worker | None:
        """The worker with this id; None for the store, or one of an earlier group."""
        return self.workers.get(process_id - self.store_id - 1)

    def open_meeting(self, starter: Starter, *, starter_serves: bool) -> None:
        """Choose where the workers meet, and have the starter serve their store there where it can."""
        self.host(starter, open_meeting(self._spec, starter_serves=starter_serves))

    def host(self, starter: Starter, opened: OpenedMeeting) -> None:
        """Let the workers of the whole world meet here: the starter takes over the listener, which is used up."""
        self.meet_at(opened.meeting)
        if opened.listener is None:
            return
        place = {"address": opened.address, "port": opened.port, "world_size": self._world.world_size}
        with opened.listener as listener:
            starter.ask({"kind": "serve_store", "id": self.store_id, **place}, [listener.fileno()])

    def meet_at(self, meeting: Meeting) -> None:
        """Let the workers meet where another node has them meet."""
        self._meeting = meeting

    def spawn(self, starter: Starter, directory: RunDirectory, pump: OutputPump) -> Iterator[Worker]:
        """Ask for every worker; yields each with its channel open."""
        for local_rank in range(self._size):
            worker, worker_end = self._prepare(local_rank, directory)
            outputs = pump.open(worker.place, worker.files, directory.attempt(self._attempt))
            try:
                starter.ask(self._request(worker), [*outputs, worker_end.fileno()])
            finally:
                worker_end.close()
                for fd in outputs:
                    os.close(fd)
            self.workers[local_rank] = worker
            yield worker

    def close(self) -> None:
        """Forget the channels."""
        for worker in self.workers.values():
            worker.channel.close()

    def _prepare(self, local_rank: int, directory: RunDirectory) -> tuple[Worker, socket.socket]:
        place = self._world.place(local_rank, self._size, self._spec.role)
        agent_end, worker_end = socket.socketpair()
        files = directory.worker(self._attempt, local_rank)
        return Worker(self.store_id + 1 + local_rank, place, files, WorkerChannel(agent_end)), worker_end

    def _request(self, worker: Worker) -> dict[str, object]:
        program, local_rank = self._spec.program, worker.place.local_rank
        arguments = expand_local_rank(program.args, local_rank)
        if self._spec.local_rank_argument:
            arguments = [f"--local-rank={local_rank}", *arguments]
        command = program.command()[: -len(program.args) or None] + arguments
        return {
            "kind": "spawn",
            "id": worker.id,
            "environment": self._environment(worker),
            "arguments": arguments if arguments != list(program.args) else None,
            "command": command,
            "python": program.kind is not ProgramKind.EXECUTABLE,
        }

    def _environment(self, worker: Worker) -> dict[str, str]:
        variables = worker_environment(
            worker.place,
            self._meeting,
            run_id=self._spec.run_id,
            restart_count=self._restart_count,
            max_restarts=self._spec.restart.max_restarts,
            error_file=str(worker.files.error or ""),
            signals=",".join(signum.name for signum in self._spec.signals),
            inherited=os.environ,
            virtual_local_rank=self._spec.virtual_local_rank,
        )
        return {**variables, **self._more_environment}
