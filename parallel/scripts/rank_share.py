"""One rank's share of what a script's own sampler, batch sampler or stream yields.

Every rank draws the whole order and keeps its part, so all must draw the same: the global random generators are
seeded alike while a sampler draws. A sampler with a generator of its own must seed it alike on every rank.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler

T = TypeVar("T")


def even_share(items: Sequence[T], rank: int, world_size: int, drop_last: bool) -> list[T]:
    """Every ``world_size``-th item from ``rank`` on, as many for each rank.

    What does not divide is left out with ``drop_last``; else items are repeated from the beginning.
    """
    whole, rest = divmod(len(items), world_size)
    if rest and not drop_last:
        missing = world_size - rest
        items = [*items, *(items[index % len(items)] for index in range(missing))]
        whole += 1
    return list(items[rank : whole * world_size : world_size])


class RankShare(Sampler[T], Generic[T]):
    """A sampler's or batch sampler's share of one rank; each epoch is drawn anew.

    Args:
        source: with a length; draws from the global generators, or from its own, seeded alike on every rank.
        rank: this process's rank.
        world_size: number of ranks.
        seed: the same on every rank.
        drop_last: leave out what does not divide evenly, instead of repeating some.
    """

    def __init__(self, source: Iterable[T], rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        self.source = source
        self.rank = rank
        self.num_replicas = world_size
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def __iter__(self) -> Iterator[T]:
        with same_draws(self.seed + self.epoch):
            items = list(self.source)
        return iter(even_share(items, self.rank, self.num_replicas, self.drop_last))

    def __len__(self) -> int:
        size = len(self.source)  # type: ignore[arg-type]
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Draw another order."""
        self.epoch = epoch


class RankStream(IterableDataset[T], Generic[T]):
    """A stream's share of one rank: of each ``world_size`` items one; an incomplete last group is left out.

    With loader workers each worker's stream is shared out in the same way, so a dataset that gives its workers
    different items keeps doing so. The source must yield the same order on every rank.
    """

    def __init__(self, source: IterableDataset[T], rank: int, world_size: int) -> None:
        self.source = source
        self.rank = rank
        self.num_replicas = world_size

    def __iter__(self) -> Iterator[T]:
        items = iter(self.source)
        while len(group := list(islice(items, self.num_replicas))) == self.num_replicas:
            yield group[self.rank]

    def __len__(self) -> int:
        return len(self.source) // self.num_replicas  # type: ignore[arg-type]  # a TypeError where it has none


@contextmanager
def same_draws(seed: int) -> Iterator[None]:
    """torch's, Python's and numpy's global generators seeded, and put back afterwards."""
    numpy: Any = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
