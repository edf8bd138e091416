"""Real processes with a gloo process group, kept between tests, so that a case costs milliseconds and not an import.

The processes are forked from a server that has imported torch and nothing else (multiprocessing's forkserver), so no
thread of pytest's is ever forked over.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "dlaunch.parallel.ddp.naive"])


WorldOf = Callable[[int], "World"]


class RankFailed(AssertionError):
    """A case raised on some rank; the text has the traceback of each."""


class World:
    """``size`` processes that run one function after another, each with its rank.

    Args:
        size: number of ranks.
        collective_timeout_s: the process group's time-out.
    """

    def __init__(self, size: int, collective_timeout_s: float = 60) -> None:
        if ROOT not in sys.path:
            sys.path.append(ROOT)  # the ranks find the test's module by its name
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="world")
        pipes = [_CONTEXT.Pipe() for _ in range(size)]
        self.connections: list[Connection] = [ours for ours, _ in pipes]
        self.processes = [
            _CONTEXT.Process(
                target=_serve,
                args=(theirs, rank, size, f"{self._directory.name}/store", collective_timeout_s),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``function(rank, *arguments)`` on every rank."""
        for connection in self.connections:
            connection.send((function, arguments))

    def result(self, rank: int, timeout_s: float = 90) -> Any:
        """What ``function`` returned on ``rank``.

        Raises:
            RankFailed: it raised, its process died or it took longer than ``timeout_s``.
        """
        if not self.connections[rank].poll(timeout_s):
            raise RankFailed(f"rank {rank} did not finish within {timeout_s:g} s")
        try:
            ok, value = pickle.loads(self.connections[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(5)
            raise RankFailed(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None
        if not ok:
            raise RankFailed(f"on rank {rank}:\n{value}")
        return value

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90) -> list[Any]:
        """Run ``function(rank, *arguments)`` on every rank and return the results in order of ranks."""
        self.start(function, *arguments)
        results: list[Any] = []
        failures: list[str] = []
        for rank in range(self.size):
            try:
                results.append(self.result(rank, timeout_s if not failures else 5))
            except RankFailed as failure:
                failures.append(str(failure))
        if failures:
            self.close()
            raise RankFailed("\n".join(failures))
        return results

    @property
    def is_open(self) -> bool:
        """Whether all ranks live."""
        return all(process.is_alive() for process in self.processes)

    def kill(self, rank: int) -> None:
        """End one rank as ``kill -9`` does."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all ranks, whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()
        self._directory.cleanup()


def _serve(connection: Connection, rank: int, size: int, store: str, collective_timeout_s: float) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=collective_timeout_s),
    )
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
