"""How a collective begins: each rank says in one row of numbers what it called, so that misfits are told, not sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .collective_error import CollectiveError

Group: TypeAlias = "dist.ProcessGroup | None"

_NAMES = ("all_gather", "all_reduce", "all_gather_object", "broadcast_object", "average", "barrier")
MAX_DIMENSIONS = 16
_DTYPE_BYTES = 16


class Opening(NamedTuple):
    """What a rank says of its call before anything else is exchanged."""

    collective: str
    argument: int  # the operation of a reduction, the source of a broadcast
    shape: tuple[int, ...]
    dtype: str

    def row(self) -> list[int]:
        """As numbers, as many for every call."""
        padding = [0] * (MAX_DIMENSIONS - len(self.shape))
        dtype = self.dtype.encode().ljust(_DTYPE_BYTES, b"\0")
        return [_NAMES.index(self.collective), self.argument, len(self.shape), *self.shape, *padding, *dtype]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Opening:
        """The call that a ``row`` came from."""
        dtype = bytes(row[3 + MAX_DIMENSIONS :]).rstrip(b"\0").decode()
        return cls(_NAMES[row[0]], row[1], tuple(row[3 : 3 + row[2]]), dtype)


def opened(
    collective: str,
    shape: torch.Size,
    dtype: torch.dtype,
    group: Group,
    timeout_s: float | None,
    *,
    argument: int = 0,
) -> list[Opening]:
    """What every rank calls; raises CollectiveError if that is not the same."""
    mine = Opening(collective, argument, tuple(shape), str(dtype).removeprefix("torch."))
    rows = _gathered_row(torch.tensor(mine.row()), group, timeout_s).tolist()
    openings = [Opening.from_row(row) for row in rows]
    check_same_collective(openings, dist.get_rank(group))
    return openings


def check_alike(openings: Sequence[Opening], what: str) -> None:
    """Raises TypeError (dtypes) or ValueError if the ranks do not agree in a field of their openings."""
    given = [getattr(opening, what) for opening in openings]
    if len(set(given)) > 1:
        kind = TypeError if what == "dtype" else ValueError
        raise kind(f"the ranks call {openings[0].collective} with different {what}s: {given} (in order of ranks)")


def check_same_collective(openings: Sequence[Opening], rank: int) -> None:
    """Raises CollectiveError if another rank called another collective than ``rank``."""
    mine = openings[rank].collective
    for other, opening in enumerate(openings):
        if opening.collective != mine:
            raise CollectiveError(
                f"rank {rank} of {len(openings)}: {mine} failed: rank {other} called {opening.collective} in "
                "its place; all ranks must call the same collectives in the same order",
                collective=mine,
                rank=rank,
                world_size=len(openings),
            )


def wait(start: Callable[[], dist.Work | None], timeout_s: float | None) -> None:
    """Start a collective and wait for it; ``None`` waits as long as the group does."""
    work = start()
    if work is None:
        raise RuntimeError("this process is not in the group")
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def device_of(group: Group) -> torch.device:
    """Where tensors must be that the group can move: the CPU wherever it has a backend for it."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = dist.get_backend_config(group).partition(":")[0]
    return torch.device(accelerator, torch.get_device_module(accelerator).current_device())


def _gathered_row(row: Tensor, group: Group, timeout_s: float | None) -> Tensor:
    """One int64 row of the same length from each rank, stacked, on the CPU."""
    here = row.to(device_of(group))
    rows = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    wait(lambda: dist.all_gather(rows, here, group, async_op=True), timeout_s)
    return torch.stack(rows).cpu()
