"""Who takes which sample of an epoch: arithmetic on positions, with no data and no processes.

An epoch is one global order of ``size`` samples. Ranks take it in turns, so that step k of a world of W ranks with
batches of B consumes the contiguous block [start + k*W*B, start + (k+1)*W*B): what has been consumed is always one
number, whatever W and B were before. That is why a job may go on with another world in the middle of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """What happens where the samples left do not divide evenly among the ranks."""

    RAGGED = "ragged"  # the first ranks get one sample more: every sample exactly once
    PAD = "pad"  # samples from the beginning of the order are repeated, as torch's DistributedSampler does
    DROP = "drop"  # the last samples, fewer than there are ranks, are left out


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes of the samples that are left of an epoch."""

    size: int  # samples of the whole epoch
    start: int  # samples consumed before this share was cut
    world_size: int
    rank: int
    ending: Ending = Ending.RAGGED

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.world_size - 1}]")
        if not 0 <= self.start <= self.size:
            raise ValueError(f"position {self.start} is not within an epoch of {self.size} samples")

    @property
    def left(self) -> int:
        """Samples of the epoch that nobody has consumed, on all ranks."""
        return self.size - self.start

    def samples(self, rank: int | None = None) -> int:
        """How many samples a rank takes (this one, unless another is named)."""
        whole, rest = divmod(self.left, self.world_size)
        match self.ending:
            case Ending.RAGGED:
                return whole + ((self.rank if rank is None else rank) < rest)
            case Ending.PAD:
                return whole + (rest > 0)
            case Ending.DROP:
                return whole

    def positions(self) -> list[int]:
        """Where this rank's samples stand in the global order; padding wraps to the beginning."""
        first = self.start + self.rank
        return [(first + taken * self.world_size) % self.size for taken in range(self.samples())]

    def consumed(self, samples: int) -> int:
        """The position of the epoch once every rank has taken ``samples`` of its share (or all, if it has fewer)."""
        position = min(self.size, self.start + samples * self.world_size)
        nothing_more = self.ending is Ending.DROP and self.size - position < self.world_size
        return self.size if nothing_more else position

    def steps(self, batch_size: int, *, drop_last: bool = False) -> int:
        """Steps until no rank has a batch left: the same number on every rank."""
        return batches(self.samples(0), batch_size, drop_last=drop_last)

    def common_steps(self, batch_size: int, *, drop_last: bool = False) -> int:
        """Steps in which every rank has a batch: ``steps``, or one fewer."""
        return batches(self.samples(self.world_size - 1), batch_size, drop_last=drop_last)


def batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """How many batches a loader makes of ``samples``."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def taker_in_stream(offset: int, world_size: int, batch_size: int, workers: int) -> tuple[int, int]:
    """(rank, loader worker) that takes the item ``offset`` after the start of a stream.

    A loader asks its workers for a batch in turns, so batch j of a rank comes from worker j mod ``workers``.
    """
    step, within = divmod(offset, world_size * batch_size)
    return within % world_size, step % workers
