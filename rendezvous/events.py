"""All that can happen to a member of a run, as values on one queue (named tuples, as the agent's events are)."""

from __future__ import annotations

from typing import Any, NamedTuple

from dlaunch.outcome import Failure

from .store import Answer, Changes, StoreError, WatchLost


class Join(NamedTuple):
    """Take part. The first event."""


# --- from the store --------------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """The answer to an `Ask`, or its failure."""

    id: int
    answer: Answer | StoreError


class WatchHeard(NamedTuple):
    """A watch has heard something, or is over."""

    id: int
    what: Changes | WatchLost


# --- from the clock --------------------------------------------------------------------------------------------------


class TimerFired(NamedTuple):
    """A timer that the member set has run out."""

    name: str


# --- from the peers --------------------------------------------------------------------------------------------------


class PeerSaid(NamedTuple):
    """A peer that proved to know the run's token sent a message."""

    node_id: str  # the sender
    message: dict[str, Any]


class PeerGone(NamedTuple):
    """A peer that was followed is dead, and so is all that it had started: proof (2) of docs/protocol.md."""

    node_id: str


# --- from this node's workers ----------------------------------------------------------------------------------------


class MeetingOpened(NamedTuple):
    """A socket for the workers' store of a round is listening here (the answer to `OpenMeeting`)."""

    round: int
    address: str
    port: int
    served: bool  # by us; else the port is free, and rank 0 binds it


class WorkersFailed(NamedTuple):
    """A worker of ours failed of itself; the others are being stopped already. Details may still be missing."""

    round: int
    failure: Failure


class WorkersStopped(NamedTuple):
    """No worker of the round lives here any more, nor anything that one has started; not all had succeeded."""

    round: int
    failure: Failure | None  # with all details, where one of ours failed of itself


class WorkersFinished(NamedTuple):
    """Every worker of the round has succeeded, and nothing of them is left."""

    round: int


class Leaving(NamedTuple):
    """This node is about to leave: its workers are being stopped."""

    reason: str


class Leave(NamedTuple):
    """Leave now: the workers are gone (or there were none). Answered by `Left`."""

    reason: str


Event = (
    Join
    | Answered
    | WatchHeard
    | TimerFired
    | PeerSaid
    | PeerGone
    | MeetingOpened
    | WorkersFailed
    | WorkersStopped
    | WorkersFinished
    | Leaving
    | Leave
)
