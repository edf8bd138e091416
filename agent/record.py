"""The run's record on disk: who the agent is, what runs, how it ended. Later commands find runs by it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from dlaunch.environ import World
from dlaunch.outcome import Outcome
from dlaunch.spec import JobSpec

from .writer import FileWriter

SCHEMA = "dlaunch.record/1"
LAST_WRITE_S = 5.0  # for a file system that does not answer when the run is over


class RunRecord:
    """``record.json`` in the run directory, replaced atomically at each change; without a path, nothing is kept.

    With a writer, its thread does that, and only `finished` waits for it. Of a node among several the record also has
    ``node_id``, ``group_rank`` and ``round``; ``workers`` are this node's, by their rank in the whole world.
    """

    def __init__(
        self, path: Path | None, spec: JobSpec, local_world_size: int, node: str, writer: FileWriter | None = None
    ) -> None:
        self._path = path
        self._writer = writer
        self._local_world_size = local_world_size
        self._texts: deque[str] = deque(maxlen=1)  # the newest that is to be written
        self._document: dict[str, Any] = {
            "schema": SCHEMA,
            "run_id": spec.run_id,
            "node": node,
            "program": {"kind": spec.program.kind.value, "target": spec.program.target},
            "world_size": local_world_size,
            "agent": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            "started_at": time.time(),
            "state": "running",
            "attempt": 0,
            "starter": None,
            "workers": {},
        }
        self._write()

    def starter_ready(self, pid: int) -> None:
        """The starter's process id is known."""
        self._document["starter"] = pid

    def registered(self, node_id: str) -> None:
        """This node has told the others of itself, under this name."""
        self._document["node_id"] = node_id
        self._write()

    def attempt_started(self, attempt: int, world: World | None = None, round_number: int | None = None) -> None:
        """A new attempt replaces the workers of the last; ``world`` and the round are those of a node among several."""
        if world is not None:
            self._document.update(world_size=world.world_size, group_rank=world.group_rank)
        if round_number is not None:
            self._document["round"] = round_number
        self._document.update(attempt=attempt, workers={})
        self._write()

    def worker_started(self, rank: int, pid: int) -> None:
        """A worker's process id is known; written once the group is whole."""
        self._document["workers"][str(rank)] = pid
        if len(self._document["workers"]) == self._local_world_size:
            self._write()

    def finished(self, outcome: Outcome) -> None:
        """The run is over."""
        self._document.update(
            state=outcome.state.value,
            exit_code=outcome.exit_code,
            reason=outcome.reason,
            restarts_used=outcome.restarts_used,
            ended_at=time.time(),
            workers={},
        )
        self._write()
        if self._writer is not None:
            self._writer.wait(LAST_WRITE_S)

    def _write(self) -> None:
        if self._path is None:
            return
        self._texts.append(json.dumps(self._document, indent=1) + "\n")
        if self._writer is None:
            self._replace()
        else:
            self._writer.do(self._replace)

    def _replace(self) -> None:
        path = self._path
        if path is None or not self._texts:  # a newer one was written in place of this one
            return
        text, fresh = self._texts.pop(), path.with_suffix(".new")
        try:
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
        except OSError:
            self._path = None  # a full disk must not stop a job; the record ends here


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, its identity. Source: proc(5), field 22."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
