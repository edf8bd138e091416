"""``--summary-json``: how a run ended, for programs. The schema is docs/reference/summary.schema.json.

No argument of the script, no value of the environment and no output of a worker is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

from dlaunch import __version__, clock
from dlaunch.outcome import Attempt, ExceptionInfo, Failure, Outcome, signal_name
from dlaunch.spec import JobSpec, Program

from .hints import hint
from .text import say

SCHEMA = "dlaunch.summary/1"

Document = dict[str, Any]
OtherEnd = Literal["refused", "crashed"]  # for a reason that was told; by a bug of dlaunch


def write_outcome(path: Path, spec: JobSpec, outcome: Outcome) -> None:
    """Write the summary of a run that was started; that it cannot be written does not change how the run ended."""
    wall_offset_s = time.time() - clock.now()
    try:
        _write(path, outcome_document(outcome, spec.program, wall_offset_s))
    except OSError as error:
        say(f"dlaunch: the summary could not be written to {path}: {error.strerror}.")


def write_other_end(path: Path, state: OtherEnd, exit_code: int, reason: str) -> None:
    """Write the summary of a run that no worker's end decided.

    The reason itself is what is told to people; it may be that this file cannot be written.
    """
    with contextlib.suppress(OSError):
        _write(path, _common(state, exit_code, reason, time.time()))


def outcome_document(outcome: Outcome, program: Program, wall_offset_s: float) -> Document:
    """The summary of a run; ``wall_offset_s`` turns seconds on the run's clock into seconds since 1970."""
    return {
        **_common(outcome.state.value, outcome.exit_code, outcome.reason, wall_offset_s + outcome.ended_at),
        "started_at": _iso(wall_offset_s + outcome.started_at),
        "duration_s": _seconds(outcome.ended_at - outcome.started_at),
        "run_id": outcome.run_id,
        "program": {"kind": program.kind.value, "target": program.target},
        "node": outcome.node,
        "world_size": outcome.world_size,
        "restarts_used": outcome.restarts_used,
        "max_restarts": outcome.max_restarts,
        "signal": signal_name(outcome.signal) if outcome.signal else None,
        "run_dir": outcome.run_dir,
        "root_cause": _failure(outcome.root_cause, program) if outcome.root_cause else None,
        "attempts": [_attempt(attempt, outcome.started_at, program) for attempt in outcome.attempts],
    }


def _common(state: str, exit_code: int, reason: str, ended_at: float) -> Document:
    return {
        "schema": SCHEMA,
        "dlaunch_version": __version__,
        "state": state,
        "exit_code": int(exit_code),
        "reason": reason,
        "ended_at": _iso(ended_at),
    }


def _attempt(attempt: Attempt, run_started_at: float, program: Program) -> Document:
    return {
        "number": attempt.number,
        "started_after_s": _seconds(attempt.started_at - run_started_at),
        "duration_s": _seconds(attempt.ended_at - attempt.started_at),
        "victims": attempt.victims,
        "root_cause": _failure(attempt.root_cause, program) if attempt.root_cause else None,
    }


def _failure(failure: Failure, program: Program) -> Document:
    status = failure.status
    return {
        "kind": failure.kind.value,
        "attempt": failure.attempt,
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "node": failure.node,
        "pid": failure.pid,
        "exit_code": status.code if status else None,
        "signal": signal_name(status.signal) if status and status.signal is not None else None,
        "lifetime_s": _seconds(failure.lifetime_s),
        "detail": failure.detail,
        "exception": _exception(failure.exception) if failure.exception else None,
        "hint": hint(failure, program.kind),
        "log_file": failure.log_file,
    }


def _exception(exception: ExceptionInfo) -> Document:
    return {
        "type": exception.type,
        "message": exception.message,
        "frames": [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in exception.frames],
    }


def _seconds(value: float) -> float:
    return round(max(value, 0.0), 3)


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"


def _write(path: Path, document: Document) -> None:
    """Put the whole file in place at once; raises OSError."""
    text = json.dumps(document, indent=2) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
