"""Which parameters share a bucket: a pure function of their sizes and of the order in which gradients come.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = 1 * MIB  # small, so that communication starts while most of the backward is still to come
BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True, slots=True)
class Slot:
    """What the layout needs to know of one parameter."""

    bytes: int
    kind: Hashable  # only slots of one kind (data type and device) can lie in one buffer
    sparse: bool = False  # a sparse gradient travels alone


Layout = tuple[tuple[int, ...], ...]


def bucket_caps(bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """The sizes in bytes at which the first, second, ... bucket is full; the last one holds for all that follow."""
    if bucket_cap_mb_list:
        return [int(cap * MIB) for cap in bucket_cap_mb_list]
    if bucket_cap_mb is not None:
        return [int(bucket_cap_mb * MIB)]
    return [FIRST_BUCKET_BYTES, BUCKET_BYTES]


def lay_out(slots: Sequence[Slot], order: Sequence[int], caps: Sequence[int]) -> Layout:
    """Fill buckets with the slots in ``order``, one open bucket for each kind.

    Args:
        slots: one for each parameter.
        order: indices into ``slots``, in the order in which their gradients are expected.
        caps: a bucket is closed once it holds so many bytes or more; see `bucket_caps`.

    Returns:
        Buckets of indices, in the order in which they become ready: by their last slot.
    """
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    closed_of_kind: dict[Hashable, int] = {}
    for index in order:
        slot = slots[index]
        if slot.sparse:
            closed.append([index])
            continue
        bucket = open_buckets.setdefault(slot.kind, [])
        bucket.append(index)
        number = closed_of_kind.get(slot.kind, 0)
        if sum(slots[member].bytes for member in bucket) >= caps[min(number, len(caps) - 1)]:
            closed.append(open_buckets.pop(slot.kind))
            closed_of_kind[slot.kind] = number + 1
    position = {index: place for place, index in enumerate(order)}
    buckets = [*closed, *open_buckets.values()]
    return tuple(tuple(bucket) for bucket in sorted(buckets, key=lambda bucket: position[bucket[-1]]))
