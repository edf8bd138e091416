"""All that the machine can ask its shell to do, as values (named tuples, as events are)."""

from __future__ import annotations

from typing import NamedTuple

from dlaunch.errors import DlaunchError
from dlaunch.outcome import Failure, Outcome
from dlaunch.rendezvous.values import Assignment
from dlaunch.spec import StartMethod


class StartStarter(NamedTuple):
    """Start a guard and, below it, a starter."""

    method: StartMethod


class SpawnGroup(NamedTuple):
    """Ask the starter for one worker per local rank, and for the store where they meet."""

    attempt: int
    assignment: Assignment | None = None  # the place of this node's group in the world; None: it is the world


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


class JoinRun(NamedTuple):
    """This node can start workers: take part in the agreement, if that was not done before."""


class TellFailed(NamedTuple):
    """Tell the other nodes at once that a worker of ours failed."""

    round: int
    failure: Failure


class TellStopped(NamedTuple):
    """Tell the other nodes that nothing of a round lives here any more."""

    round: int
    failure: Failure | None


class TellFinished(NamedTuple):
    """Tell the other nodes that all our workers of a round have succeeded."""

    round: int


class TellLeaving(NamedTuple):
    """Tell the other nodes that this one is about to leave."""

    reason: str


class LeaveRun(NamedTuple):
    """Leave the run now, with no worker alive; answered by HasLeft."""

    reason: str


class GiveUp(NamedTuple):
    """End with an error of dlaunch, not with an outcome of the job."""

    error: DlaunchError


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
    | JoinRun
    | TellFailed
    | TellStopped
    | TellFinished
    | TellLeaving
    | LeaveRun
    | GiveUp
    | Abandon
    | Finish
)
