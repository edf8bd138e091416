"""What ranks hold of a model at some step, and the newest step of which all rows are there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .held_rows import HeldValues, Key


@dataclass(frozen=True)
class Generation:
    """What one rank held at one step.

    Attributes:
        step: the number that ``refresh`` was given, or how many steps the optimizer has made.
        world_size: of the world then.
        rows: by rank of that world: this rank's own and, of a replica, its neighbour's.
        values: the optimizer's numbers.
    """

    step: int
    world_size: int
    rows: dict[int, dict[Key, Tensor]]
    values: HeldValues


class Holding(NamedTuple):
    """What a rank tells the others of a generation."""

    world_size: int
    rows: Sequence[int]  # ranks of that world whose rows it holds


class Whole(NamedTuple):
    """A step of which all rows are there, and who has them."""

    step: int
    world_size: int
    owners: dict[int, int]  # rank of the old world to the rank that sends its rows
    speaker: int  # sends what is the same everywhere


def newest_whole(held: Sequence[Mapping[int, Holding]]) -> Whole:
    """The newest step of which the ranks hold all rows between them; rows of different steps are never mixed.

    Args:
        held: what each rank holds, by step; nothing on one that joins.

    Raises:
        RuntimeError: there is no such step.
    """
    steps = sorted({step for holdings in held for step in holdings}, reverse=True)
    for step in steps:
        holders = {rank: holdings[step] for rank, holdings in enumerate(held) if step in holdings}
        owners: dict[int, int] = {}
        for rank, holding in holders.items():
            for old in holding.rows:
                owners.setdefault(old, rank)
        world_size = max(holding.world_size for holding in holders.values())
        if set(range(world_size)) <= set(owners):
            return Whole(step, world_size, owners, min(holders))
    raise RuntimeError(_why_none(held, steps))


def _why_none(held: Sequence[Mapping[int, Holding]], steps: Sequence[int]) -> str:
    if not steps:
        return (
            "No rank that remains holds a state: none was saved, or a rank was lost before the first refresh was "
            "complete. Load a checkpoint."
        )
    known: set[int] = set()
    world_size = 0
    for holdings in held:
        for holding in holdings.values():
            known.update(holding.rows)
            world_size = max(world_size, holding.world_size)
    if missing := sorted(set(range(world_size)) - known):
        return (
            f"The rows of rank {', '.join(map(str, missing))} of the old world are lost: no rank has a copy. "
            "Keep Replicas(model, optimizer), whose copies outlive the loss of one rank, or load a checkpoint."
        )
    told = ", ".join(
        f"rank {rank} holds step {' and '.join(map(str, sorted(holdings)))}"
        for rank, holdings in enumerate(held)
        if holdings
    )
    return (
        f"There is no step of which all rows are left: {told}. Rows of different steps cannot be put together; "
        "keep Replicas(model, optimizer), or load a checkpoint."
    )
