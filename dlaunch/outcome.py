"""How processes, attempts and runs ended: values that the agent fills in and the launcher tells.

Named tuples, because each dataclass costs 0.8 ms more at every start and these need no check at birth.
"""

from __future__ import annotations

import os
import signal
from enum import Enum
from typing import NamedTuple

from .errors import ExitCode


class ExitStatus(NamedTuple):
    """How one process ended: exactly one of an exit code and a signal. Made once, where the child is reaped."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_wait(cls, status: int) -> ExitStatus:
        """From the status word of wait(2)."""
        value = os.waitstatus_to_exitcode(status)
        return cls(signal=-value) if value < 0 else cls(code=value)

    @property
    def ok(self) -> bool:
        """Whether the process ended as a success."""
        return self.code == 0

    @property
    def as_exit_code(self) -> int:
        """The code itself, or 128+N for a signal N, as shells have it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        return f"signal {self.signal} ({signal_name(self.signal)})"


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time and unknown ones by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class TracebackFrame(NamedTuple):
    """One line of a Python traceback."""

    file: str
    line: int
    function: str
    source: str = ""


class ExceptionInfo(NamedTuple):
    """An exception that ended a worker, as its own interpreter saw it."""

    type: str
    message: str
    frames: tuple[TracebackFrame, ...] = ()  # outermost first
    traceback: str = ""


class FailureKind(Enum):
    """What sort of end a failure was: decides the hint, and tells programs what the sentence tells people."""

    EXCEPTION = "exception"
    EXIT = "exit"  # a non-zero exit code without an exception
    SIGNAL = "signal"
    OOM_KILL = "oom-kill"  # the kernel's out-of-memory killer
    NOT_STARTED = "not-started"  # the program could not be executed
    INFRASTRUCTURE = "infrastructure"  # a process of dlaunch's own died (the starter, the workers' store)


class Failure(NamedTuple):
    """One worker's failure."""

    kind: FailureKind
    attempt: int
    rank: int | None  # None for a process of dlaunch's own
    local_rank: int | None
    node: str
    pid: int | None
    status: ExitStatus | None
    at: float  # seconds on dlaunch.clock: of the exception where there is one, else of the death
    lifetime_s: float
    detail: str = ""  # a sentence, where kind and status do not say it all
    exception: ExceptionInfo | None = None
    finalized: bool = False  # the interpreter went through its normal end (so an exit code came from sys.exit)
    last_output: tuple[str, ...] = ()
    log_file: str | None = None

    @property
    def exit_code(self) -> int:
        """What dlaunch exits with when this failure ends the run."""
        return self.status.as_exit_code if self.status is not None and not self.status.ok else ExitCode.INTERNAL


def describe(failure: Failure) -> str:
    """What failed and how, in half a sentence."""
    who = f"rank {failure.rank} (pid {failure.pid})" if failure.rank is not None else failure.detail
    if failure.kind is FailureKind.NOT_STARTED:
        return f"rank {failure.rank} could not be started: {failure.detail}"
    if failure.kind is FailureKind.INFRASTRUCTURE:
        return f"{who}: {failure.status}" if failure.status else who
    if failure.kind is FailureKind.OOM_KILL:
        return f"{who} was killed by the kernel: out of memory"
    if failure.exception is not None:
        return f"{who} raised {failure.exception.type}"
    return f"{who} ended with {failure.status}"


class Attempt(NamedTuple):
    """One life of the worker group."""

    number: int
    started_at: float
    ended_at: float
    root_cause: Failure | None  # None: it succeeded, or was stopped from outside
    victims: int = 0  # workers that were stopped, or failed, because of the root cause


class RunState(Enum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by a signal to dlaunch


class Outcome(NamedTuple):
    """How a run ended, and how it came to that."""

    state: RunState
    exit_code: int
    reason: str  # one sentence: why it ended here, for instance why there was no further restart
    attempts: tuple[Attempt, ...]
    world_size: int
    restarts_used: int
    max_restarts: int
    run_id: str
    node: str
    started_at: float
    ended_at: float
    signal: int | None = None  # that interrupted it
    run_dir: str | None = None

    @property
    def root_cause(self) -> Failure | None:
        """The failure that ended the run; None unless it failed."""
        return self.attempts[-1].root_cause if self.state is RunState.FAILED and self.attempts else None
