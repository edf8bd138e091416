"""Counters by which the ranks of one host tell each other how far they are.

[Note: parameters in shared memory]
On one CPU host the whole parameters of a unit lie in memory that all its ranks map: each rank's rows are its own part
of it, and "gathering" is no more than knowing that all have written theirs. Two fences keep readers and writers apart:

    ``written`` = k: this rank's rows are what is to be seen from its k-th forward on;
    ``read``    = k: this rank has ended reading for the k-th time, and others may write.

Reading ends with a backward, at the end of a forward without gradients, or at the latest before an optimizer's step.
See [Note: counters] in ``transport/counters.py`` for how they are kept and waited for.
"""

from __future__ import annotations

from enum import IntEnum

import torch.distributed as dist

from ..transport.counters import FIRST_PLACE, HEADER_BYTES, Counters, timeout_of
from ..transport.shared_segments import map_segments

_YIELD_S = 0.002


class Counter(IntEnum):
    """Places in the header, in units of eight bytes."""

    WRITTEN = FIRST_PLACE
    READ = FIRST_PLACE + 8
    FILLED = FIRST_PLACE + 16
    SUMMED = FIRST_PLACE + 24


class SharedCounters(Counters):
    """One set for each rank of a group; all ranks of the group make it together.

    Raises:
        OSError: a rank could not map the others' memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        segments = map_segments(HEADER_BYTES, group)
        if segments is None:
            raise OSError("the ranks cannot map each other's memory")
        super().__init__(
            segments, dist.get_rank(group), timeout_of(group), yield_s=_YIELD_S, what="FSDP in shared memory"
        )
