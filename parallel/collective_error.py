"""What a failed collective tells: which rank this is, what it waited for and how long, and what likely happened.

    RuntimeError
    └── CollectiveError        a collective, or the reduction of gradients, failed
        ├── CollectiveTimeout  not all ranks came in time (also a TimeoutError)
        └── PeerLost           another rank died, closed its connection or gave up (also a ConnectionError)

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
    """A collective failed: a peer died, the network broke, the time was up or the backend refused.

    In a backward of ours, parameters are as they were before it; its gradients are invalid and were dropped.

    Attributes:
        collective: its name; ``None`` where not known.
        rank: this process's rank in the group; ``None`` where not known.
        world_size: ranks of the group; ``None`` where not known.
        waited_s: from the call to the failure; ``None`` where not known.
    """

    meaning = "the process group can no longer be used"

    def __init__(
        self,
        sentence: str,
        *,
        collective: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        waited_s: float | None = None,
    ) -> None:
        super().__init__(sentence)
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
    """Another rank died, closed its connection or gave up."""

    meaning = (
        "another rank closed its connection, because it died or gave up waiting; the cause is in the output of the "
        "rank that ended first"
    )


def kind_of(error: BaseException | str) -> type[CollectiveError]:
    """Which of the errors above a failure is; of a backend's text, the tables above are all that is known."""
    if isinstance(error, CollectiveError):
        return type(error)
    text = str(error).lower()
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
        kind, rank, size, waited_s = kind_of(error), dist.get_rank(group), dist.get_world_size(group), now() - began
        first_line = str(error).strip().partition("\n")[0]
        raise kind(
            f"rank {rank} of {size}: {collective} failed after {waited_s:.1f} s: {kind.meaning} ({first_line})",
            collective=collective,
            rank=rank,
            world_size=size,
            waited_s=waited_s,
        ) from error
