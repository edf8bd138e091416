"""Sums of sparse gradients: any number of rows on each rank, repeated or none at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlaunch.parallel.ddp.sparse import SparseSum

from .worlds import WorldOf

ROWS = [[0, 3, 3], [], [3, 6], [1]]  # of each rank: of seven


def gradient_of(rank: int, dtype: torch.dtype, dense: tuple[int, ...]) -> Tensor:
    rows = ROWS[rank % len(ROWS)]
    values = torch.arange(1.0, 1 + len(rows) * dense[0] * dense[1]).view(len(rows), *dense).to(dtype) * (1 + rank)
    values = values * 1j if dtype.is_complex else values
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, (7, *dense)).coalesce()


def sum_them(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for dense in ((2, 3), (1, 1)):
            mine = gradient_of(rank, dtype, dense)
            pending = SparseSum(mine, dist.group.WORLD, lambda work: work)
            whole = sum(gradient_of(other, dtype, dense).to_dense() for other in range(size))
            found = pending.wait()
            assert found.is_coalesced() and found.dtype is dtype
            assert torch.equal(found.to_dense(), torch.as_tensor(whole))
            touched = {row for other in range(size) for row in ROWS[other]}
            assert set(found.indices()[0].tolist()) == touched


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_all_ranks_are_added_where_they_meet(world_of: WorldOf, size: int) -> None:
    world_of(size).run(sum_them, size)


def sum_nothing(_: int) -> None:
    assert dist.group.WORLD is not None
    empty = gradient_of(1, torch.float32, (2, 3))
    assert SparseSum(empty, dist.group.WORLD, lambda work: work).wait()._nnz() == 0


def test_no_rows_anywhere_are_no_rows(world_of: WorldOf) -> None:
    world_of(2).run(sum_nothing)


def sum_one_row(rank: int, dtype: torch.dtype) -> None:
    """Four entries of one row, coalesced: what is left is a view of a larger tensor, with its strides."""
    assert dist.group.WORLD is not None
    values = torch.arange(4.0).view(4, 1).to(dtype)
    mine = torch.sparse_coo_tensor(torch.tensor([[5] * 4]), values, (7, 1)).coalesce()
    found = SparseSum(mine, dist.group.WORLD, lambda work: work).wait()
    assert found.indices().tolist() == [[5]] and found.values().tolist() == [[12]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex128])
def test_a_single_row_that_was_looked_up_several_times_is_summed(world_of: WorldOf, dtype: torch.dtype) -> None:
    world_of(2).run(sum_one_row, dtype)


def scalars(rank: int) -> list[float]:
    """No dense dimensions: every element is an entry of its own."""
    assert dist.group.WORLD is not None
    mine = torch.sparse_coo_tensor(torch.tensor([[0, 1], [rank, 2]]), torch.tensor([1.0, 2.0]), (2, 3)).coalesce()
    total: list[float] = SparseSum(mine, dist.group.WORLD, lambda work: work).wait().to_dense().flatten().tolist()
    return total


def test_gradients_that_are_sparse_in_every_dimension_are_summed(world_of: WorldOf) -> None:
    assert world_of(2).run(scalars) == [[1, 1, 0, 0, 0, 4]] * 2
