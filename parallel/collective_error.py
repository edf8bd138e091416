"""What a failed collective tells: which rank this is, what it waited for and how long, and what likely happened.

    RuntimeError
    └── CollectiveError        a collective failed for another reason
        ├── CollectiveTimeout  not all ranks came in time (also a TimeoutError)
        └── PeerLost           the connection to another rank broke (also a ConnectionError)

torch raises bare RuntimeErrors whose texts differ from backend to backend; scripts that catch those catch ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dlaunch.clock import now

_TIMED_OUT = ("timed out", "timeout", "time out", "failed to pass monitoredbarrier")
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",  # NCCL
    "ncclremoteerror",
    "remote peer",
)


class CollectiveError(RuntimeError):
    """A collective failed.

    Attributes:
        collective: its name.
        rank: this process's rank in the group.
        world_size: ranks of the group.
        waited_s: from the call to the failure.
    """

    meaning = "the process group can no longer be used"

    def __init__(self, collective: str, rank: int, world_size: int, waited_s: float, cause: str) -> None:
        first_line = cause.strip().partition("\n")[0]
        super().__init__(
            f"rank {rank} of {world_size}: {collective} failed after {waited_s:.1f} s: {self.meaning} ({first_line})"
        )
        self.collective = collective
        self.rank = rank
        self.world_size = world_size
        self.waited_s = waited_s


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Not all ranks came to the collective in time."""

    meaning = (
        "some rank did not come to it in time, because it hangs, is much slower, or took another path through the "
        "script; compare what the ranks were doing"
    )


class PeerLost(CollectiveError, ConnectionError):
    """The connection to another rank broke."""

    meaning = (
        "another rank closed its connection, because it died or gave up waiting; the cause is in the output of the "
        "rank that ended first"
    )


def kind_of(message: str) -> type[CollectiveError]:
    """Which error a backend's message stands for; the table above is all that is known."""
    text = message.lower()
    if any(sign in text for sign in _PEER_LOST):  # first: a peer that timed out closes its connections
        return PeerLost
    if any(sign in text for sign in _TIMED_OUT):
        return CollectiveTimeout
    return CollectiveError


@contextmanager
def told(collective: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn a RuntimeError of the backend into a ``CollectiveError`` that says who waited for what."""
    began = now()
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        message = str(error)
        raise kind_of(message)(
            collective, dist.get_rank(group), dist.get_world_size(group), now() - began, message
        ) from error
