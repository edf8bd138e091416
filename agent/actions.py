"""All that the machine can ask its shell to do, as values (named tuples, as events are)."""

from __future__ import annotations

from typing import NamedTuple

from dlaunch.outcome import Outcome
from dlaunch.spec import StartMethod


class StartStarter(NamedTuple):
    """Start a guard and, below it, a starter."""

    method: StartMethod


class SpawnGroup(NamedTuple):
    """Ask the starter for one worker per local rank, and for the store where they meet."""

    attempt: int


class SignalWorkers(NamedTuple):
    """Send a signal to the rank processes named."""

    signum: int
    local_ranks: tuple[int, ...]


class ForwardSignal(NamedTuple):
    """Pass on a signal that ends nothing: only to rank processes that handle it."""

    signum: int
    local_ranks: tuple[int, ...]


class KillWorkers(NamedTuple):
    """SIGKILL the rank processes named and their sessions."""

    local_ranks: tuple[int, ...]


class Sweep(NamedTuple):
    """End what the workers left behind; answered by Swept."""

    gentle_s: float  # how long it may take to end by itself; 0: SIGKILL at once


class DestroyStarter(NamedTuple):
    """SIGKILL the starter and all that is below it; answered by StarterLost."""


class SetTimer(NamedTuple):
    """Deliver TimerFired(name) at a time on dlaunch.clock."""

    name: str
    at: float


class CancelTimer(NamedTuple):
    """Forget a timer."""

    name: str


class Say(NamedTuple):
    """Tell the user one line."""

    text: str


class Abandon(NamedTuple):
    """End before any worker ran: the configuration cannot be carried out."""

    sentence: str
    fix: str


class Finish(NamedTuple):
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
