"""All that can happen to an agent, as values on one queue."""

from __future__ import annotations

from dataclasses import dataclass

from dlaunch.outcome import ExceptionInfo, ExitStatus


@dataclass(frozen=True, slots=True)
class Begin:
    """The run starts."""


@dataclass(frozen=True, slots=True)
class StarterReady:
    """The starter takes requests."""

    pid: int


@dataclass(frozen=True, slots=True)
class StarterRefused:
    """The starter cannot be forked from; it ends by itself."""

    reason: str
    asked: bool  # the module that is to blame was named by the user


@dataclass(frozen=True, slots=True)
class StarterLost:
    """The starter is dead, and so is all that was below it."""

    status: ExitStatus | None  # None: its guard died too, so nobody saw


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker process exists."""

    local_rank: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class WorkerNotStarted:
    """A worker's program could not be executed."""

    local_rank: int
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process was reaped; all that it left behind has been read."""

    local_rank: int
    status: ExitStatus
    at: float
    exception: ExceptionInfo | None = None
    failed_at: float | None = None  # when its interpreter met the exception, or began its normal end
    finalized: bool = False
    oom_killed: bool = False
    last_output: tuple[str, ...] = ()
    log_file: str | None = None


@dataclass(frozen=True, slots=True)
class StoreExited:
    """The process that serves the workers' store ended."""

    status: ExitStatus
    at: float


@dataclass(frozen=True, slots=True)
class Swept:
    """Nothing that the workers started is left."""

    killed: tuple[tuple[int, str], ...] = ()  # pid and name of what had to be killed


@dataclass(frozen=True, slots=True)
class SignalArrived:
    """A signal was sent to the agent."""

    signum: int


class Timer:
    """The names of the machine's timers; at most one of each runs."""

    GRACE = "grace"  # for workers that were asked to stop
    KILL = "kill"  # for workers that were killed
    SWEEP = "sweep"  # for the starter's answer to a sweep
    BACKOFF = "backoff"  # before a restart


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that the machine set has run out."""

    name: str


Event = (
    Begin
    | StarterReady
    | StarterRefused
    | StarterLost
    | WorkerStarted
    | WorkerNotStarted
    | WorkerExited
    | StoreExited
    | Swept
    | SignalArrived
    | TimerFired
)
