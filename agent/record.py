"""The run's record on disk: who the agent is, what runs, how it ended. Later commands find runs by it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from dlaunch.outcome import Outcome
from dlaunch.spec import JobSpec

SCHEMA = "dlaunch.record/1"


class RunRecord:
    """``record.json`` in the run directory, replaced atomically at each change; without a path, nothing is kept."""

    def __init__(self, path: Path | None, spec: JobSpec, local_world_size: int, node: str) -> None:
        self._path = path
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

    def attempt_started(self, attempt: int) -> None:
        """A new attempt replaces the workers of the last."""
        self._document.update(attempt=attempt, workers={})
        self._write()

    def worker_started(self, rank: int, pid: int) -> None:
        """A worker's process id is known; written once the group is whole."""
        self._document["workers"][str(rank)] = pid
        if len(self._document["workers"]) == self._document["world_size"]:
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

    def _write(self) -> None:
        if self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._path)
        except OSError:
            self._path = None  # a full disk must not stop a job; the record ends here


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid, its identity. Source: proc(5), field 22."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
