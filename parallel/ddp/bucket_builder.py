"""From parameters to buckets: which share one, how large each is, and where each gradient lies in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..transport.base import Transport
from .bucket import Bucket, SparseBucket
from .bucket_layout import Layout, Slot, lay_out


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter that is reduced, its name in the module, and whether its gradients are sparse."""

    name: str
    parameter: nn.Parameter
    sparse: bool = False


class BucketBuilder:
    """Builds buckets for ``members``, which are meant by their numbers.

    Args:
        members: what is reduced.
        caps: sizes of buckets in bytes; see `bucket_caps`.
        reduce_dtype: of the buffers of floating-point gradients; each parameter's own if ``None``.
    """

    def __init__(self, members: Sequence[Member], caps: Sequence[int], reduce_dtype: torch.dtype | None) -> None:
        self._members = members
        self._caps = caps
        self._reduce_dtype = reduce_dtype

    def lay_out(self, order: Iterable[int]) -> Layout:
        """The buckets for gradients that come in ``order``."""
        return lay_out([self._slot(member) for member in self._members], list(order), self._caps)

    def build(self, layout: Layout, source: Transport) -> list[Bucket | SparseBucket]:
        """Allocate; all ranks call this together, with the same layout.

        Raises:
            RuntimeError: the ranks could not agree on the buffers.
        """
        flats = source.allocate([self._buffer(numbers) for numbers in layout])
        return [
            self._bucket(index, numbers, flat) for index, (numbers, flat) in enumerate(zip(layout, flats, strict=True))
        ]

    def places(self, buckets: Iterable[Bucket | SparseBucket]) -> dict[int, Any]:
        """For each member its bucket, its view of it and its parameter."""
        return {
            number: (bucket, view, self._members[number].parameter)
            for bucket in buckets
            for number, view in zip(bucket.members, bucket.views, strict=True)
        }

    def _slot(self, member: Member) -> Slot:
        parameter, dtype = member.parameter, self._wire_dtype(member.parameter)
        return Slot(parameter.numel() * dtype.itemsize, (dtype, parameter.device), member.sparse)

    def _wire_dtype(self, parameter: Tensor) -> torch.dtype:
        reduce_dtype = self._reduce_dtype
        return reduce_dtype if reduce_dtype is not None and parameter.is_floating_point() else parameter.dtype

    def _buffer(self, numbers: Sequence[int]) -> tuple[int, torch.dtype, torch.device]:
        members = [self._members[number] for number in numbers]
        first = members[0].parameter
        numel = 0 if members[0].sparse else sum(member.parameter.numel() for member in members)
        return numel, self._wire_dtype(first), first.device

    def _bucket(self, index: int, numbers: Sequence[int], flat: Tensor) -> Bucket | SparseBucket:
        parameters = [self._members[number].parameter for number in numbers]
        if self._members[numbers[0]].sparse:
            return SparseBucket(index, numbers[0], parameters[0])
        return Bucket(index, numbers, parameters, flat)
