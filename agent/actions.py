"""All that the machine can ask its shell to do, as values."""

from __future__ import annotations

from dataclasses import dataclass

from dlaunch.outcome import Outcome
from dlaunch.spec import StartMethod


@dataclass(frozen=True, slots=True)
class StartStarter:
    """Start a guard and, below it, a starter."""

    method: StartMethod


@dataclass(frozen=True, slots=True)
class SpawnGroup:
    """Ask the starter for one worker per local rank, and for the store where they meet."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send a signal to the rank processes named."""

    signum: int
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardSignal:
    """Pass on a signal that ends nothing: only to rank processes that handle it."""

    signum: int
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """SIGKILL the rank processes named and their sessions."""

    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """End what the workers left behind; answered by Swept."""

    gentle_s: float  # how long it may take to end by itself; 0: SIGKILL at once


@dataclass(frozen=True, slots=True)
class DestroyStarter:
    """SIGKILL the starter and all that is below it; answered by StarterLost."""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Deliver TimerFired(name) at a time on dlaunch.clock."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget a timer."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user one line."""

    text: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """End before any worker ran: the configuration cannot be carried out."""

    sentence: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    outcome: Outcome


Action = (
    StartStarter
    | SpawnGroup
    | SignalWorkers
    | ForwardSignal
    | KillWorkers
    | Sweep
    | DestroyStarter
    | SetTimer
    | CancelTimer
    | Say
    | Abandon
    | Finish
)
