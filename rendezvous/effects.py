"""All that a member of a run can ask for, as values."""

from __future__ import annotations

from typing import Any, NamedTuple

from dlaunch.errors import DlaunchError

from .store import Request
from .values import Assignment, Ending, Peer

# --- of the store ----------------------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """Send a request to the store; answered by `Answered` with the same id."""

    id: int
    request: Request
    timeout_s: float


class WatchKeys(NamedTuple):
    """Watch a key, or all keys that start with it; heard by `WatchHeard` with the same id."""

    id: int
    key: str
    prefix: bool
    from_revision: int


class Unwatch(NamedTuple):
    """End a watch."""

    id: int


# --- of the clock ----------------------------------------------------------------------------------------------------


class SetTimer(NamedTuple):
    """Deliver TimerFired(name) at a time on dlaunch.clock; replaces one of the same name."""

    name: str
    at: float


class CancelTimer(NamedTuple):
    """Forget a timer."""

    name: str


# --- of the peers ----------------------------------------------------------------------------------------------------


class SetToken(NamedTuple):
    """The secret that proves to a peer that one is of this run."""

    token: str
    node_id: str  # who we are to our peers from now on


class SendPeer(NamedTuple):
    """Send a message to a peer, if it can be reached now; it may be lost."""

    peer: Peer
    message: dict[str, Any]


class FollowPeer(NamedTuple):
    """Keep a connection to this peer, and to no other that was followed before; None: follow nobody.

    `PeerGone` tells when an established connection to it ended and its address then refuses, or answers as another.
    """

    peer: Peer | None


# --- of this node ----------------------------------------------------------------------------------------------------


class SetDeadline(NamedTuple):
    """Workers must be dead, not merely signalled, at this time on dlaunch.clock, unless it is set anew before."""

    at: float


class OpenMeeting(NamedTuple):
    """Open a fresh socket for the workers' store of a round, and close an earlier one; answered by MeetingOpened."""

    round: int


class RunRound(NamedTuple):
    """Start this node's workers, with these places. Never twice for one round."""

    assignment: Assignment


class StopRound(NamedTuple):
    """Stop the workers of this round, if any live: answered by WorkersStopped (or WorkersFinished, if they were)."""

    round: int
    reason: str
    by_deadline: bool = False  # they are being killed by their starter: no grace
    is_ours: bool = False  # the reason is a failure of one of them


class Say(NamedTuple):
    """Tell the user one line."""

    text: str


class EndRun(NamedTuple):
    """The run is over, for every node alike. The last effect, but for `Left`."""

    ending: Ending


class Refuse(NamedTuple):
    """This node cannot take part (any longer): the error says why. Its workers are to be stopped. Then `Leave`."""

    error: DlaunchError


class Left(NamedTuple):
    """What was to be written is written, or it cannot be: the process may end."""


Effect = (
    Ask
    | WatchKeys
    | Unwatch
    | SetTimer
    | CancelTimer
    | SetToken
    | SendPeer
    | FollowPeer
    | SetDeadline
    | OpenMeeting
    | RunRound
    | StopRound
    | Say
    | EndRun
    | Refuse
    | Left
)
