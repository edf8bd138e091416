"""Which rows of a parameter belong to which rank, and which parameters travel alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALONE_BYTES = 128 * 1024  # from this size of a chunk on, a copy costs more than a message


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Dimension 0 cut into equal pieces; the last ranks get fewer rows, or none, when they do not go round.

    A tensor without dimensions counts as one row. There is no padding: an uneven cut is uneven everywhere.

    Attributes:
        shape: of the whole parameter.
        world_size: number of pieces.
    """

    shape: tuple[int, ...]
    world_size: int

    @property
    def total_rows(self) -> int:
        """Rows of the whole."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.total_rows * self.row_numel

    @property
    def rows_per_rank(self) -> int:
        """Rows of a full piece."""
        return -(-self.total_rows // self.world_size)

    def rows(self, rank: int) -> tuple[int, int]:
        """First row of the rank's piece and the one after its last."""
        begin = min(rank * self.rows_per_rank, self.total_rows)
        return begin, min(begin + self.rows_per_rank, self.total_rows)

    def span(self, rank: int) -> tuple[int, int]:
        """The same in elements of the whole, laid flat."""
        begin, end = self.rows(rank)
        return begin * self.row_numel, end * self.row_numel

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's piece; at least one dimension."""
        begin, end = self.rows(rank)
        return (end - begin, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class Messages:
    """How the tensors of a unit travel: large ones alone, from and to where they lie; small ones in one flat copy."""

    alone: tuple[int, ...]
    packed: tuple[tuple[int, ...], ...]  # one tuple for each data type


def messages_of(layouts: Sequence[ShardLayout], dtypes: Sequence[tuple[object, int]]) -> Messages:
    """Sort tensors by the size of a full piece.

    Args:
        layouts: of each tensor.
        dtypes: of each tensor, its data type (compared only) and the bytes of an element.
    """
    alone: list[int] = []
    packed: dict[object, list[int]] = {}
    for index, (layout, (dtype, itemsize)) in enumerate(zip(layouts, dtypes, strict=True)):
        if layout.rows_per_rank * layout.row_numel * itemsize >= ALONE_BYTES:
            alone.append(index)
        else:
            packed.setdefault(dtype, []).append(index)
    return Messages(tuple(alone), tuple(map(tuple, packed.values())))
