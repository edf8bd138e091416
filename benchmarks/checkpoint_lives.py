"""What the lives of ``checkpoint_kills.py`` do until they are killed: load, train through epochs, save every step.

A step's samples must be the next ones of the epoch's order, and an epoch must have had every sample once: the lives
look at that themselves. The world has another size and another batch size in each life.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from dlaunch.parallel import checkpoint, collectives
from dlaunch.parallel.data.sampler import ElasticDistributedSampler
from dlaunch.parallel.data.streaming import ElasticStream

EPOCH = range(997)
SEED = 3
REPORT = struct.Struct("<q")  # a step that was published; -1 when the last checkpoint is loaded
KINDS = ("sampler", "stream")  # what deals the samples out
_ROWS = 13
_Dealer = ElasticDistributedSampler | ElasticStream[int]


def weights_of(step: int) -> dict[str, Tensor]:
    """What a model has after ``step`` steps; some 300 KB."""
    generator = torch.Generator().manual_seed(step)
    return {f"layer{number}": torch.randn(128, 128, generator=generator) for number in range(5)}


def rows_of(step: int) -> Tensor:
    """What the ranks of a world have together after ``step`` steps, each some rows of it."""
    return torch.randn(_ROWS, 512, generator=torch.Generator().manual_seed(-step - 1))


@lru_cache(maxsize=2)
def order_of(epoch: int) -> list[int]:
    """The samples of an epoch in the order of a world of one."""
    alone = ElasticDistributedSampler(EPOCH, 1, 0, seed=SEED)
    alone.set_epoch(epoch)
    return list(alone)


class Epochs:
    """A stream's source: the samples in the order that the sampler gives them."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """What comes next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self._epoch))


def dealer(kind: str, batch_size: int, rank: int, world_size: int) -> _Dealer:
    """What gives a rank its samples."""
    if kind == "stream":
        return ElasticStream(Epochs(), batch_size, world_size, rank)
    return ElasticDistributedSampler(EPOCH, world_size, rank, seed=SEED)


class Progress:
    """How far training has come, and which samples of the epoch were delivered."""

    def __init__(self, dealers: list[_Dealer], directory: Path) -> None:
        self.dealers = dealers  # of this process's ranks; the first has a batch whenever any rank has
        self.step, self.epochs = 0, 0
        self.delivered: list[int] = []
        found = checkpoint.load(directory)
        if found is not None:
            self.step, self.epochs = found.step, found.state["epochs"]
            self.delivered = found.state["delivered"].tolist()
            for each in dealers:
                each.load_state_dict(found.state["dealer"])

    def begin_pass(self) -> None:
        """The next epoch, if the present one is complete."""
        first = self.dealers[0]
        if first.finished if isinstance(first, ElasticStream) else first.position == len(EPOCH):
            assert sorted(self.delivered) == list(EPOCH), f"an epoch ended after {len(self.delivered)} samples"
            self.epochs += 1
            self.delivered = []
            for each in self.dealers:
                each.set_epoch(each.epoch + 1)

    def took(self, samples: list[int]) -> None:
        """All ranks together trained on ``samples`` in one step."""
        expected = order_of(self.dealers[0].epoch)[len(self.delivered) :][: len(samples)]
        assert sorted(samples) == sorted(expected), f"step {self.step + 1} has the samples {samples}, not {expected}"
        self.delivered += samples
        self.step += 1

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "weights": weights_of(self.step),
            "dealer": self.dealers[0],
            "delivered": torch.tensor(self.delivered),
            "epochs": self.epochs,
        }


def live_alone(directory: Path, report: int, rng: random.Random, kind: str) -> NoReturn:
    """Train and save for ever; the ranks of a world take turns in one process."""
    world_size, batch_size = rng.randint(1, 6), rng.randint(1, 60)
    dealers = [dealer(kind, batch_size, rank, world_size) for rank in range(world_size)]
    progress = Progress(dealers, directory)
    os.write(report, REPORT.pack(-1))
    saver = checkpoint.Saver(directory, keep_last=3, keep_every=100)
    samplers = [each for each in dealers if isinstance(each, ElasticDistributedSampler)]
    by_hand = bool(samplers) and rng.random() < 0.5
    while True:
        progress.begin_pass()
        for samples in _by_hand(samplers, batch_size) if by_hand else _by_loader(dealers, batch_size):
            progress.took(samples)
            saver.save(progress.state(), progress.step)
            saver.wait()
            os.write(report, REPORT.pack(progress.step))


def _by_hand(samplers: list[ElasticDistributedSampler], batch_size: int) -> Iterator[list[int]]:
    """The samples of each step of a pass; every rank draws and advances."""
    shares = [iter(sampler) for sampler in samplers]
    while samplers[0].position < len(EPOCH):
        drawn = [next(share, None) for share in shares for _ in range(batch_size)]
        for sampler in samplers:
            sampler.advance(batch_size)
        yield [index for index in drawn if index is not None]


def _by_loader(dealers: list[_Dealer], batch_size: int) -> Iterator[list[int]]:
    """The same through a loader for each rank."""
    passes = [_batches(each, batch_size) for each in dealers]
    while step := [index for batches in passes for index in next(batches, [])]:
        yield step


def _batches(each: _Dealer, batch_size: int) -> Iterator[list[int]]:
    loader: DataLoader[int] = (
        DataLoader(each, batch_size) if isinstance(each, ElasticStream) else DataLoader(EPOCH, batch_size, sampler=each)  # type: ignore[arg-type]
    )
    for batch in each.batches(loader):
        yield batch.tolist()


def live_together(
    directory: Path, report: int, rng: random.Random, kind: str, rank: int, world_size: int, store: Path
) -> NoReturn:
    """Train and save for ever as one rank of several processes, each with rows of its own to save."""
    batch_size = rng.randint(1, 60)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
    )
    mine = dealer(kind, batch_size, rank, world_size)
    progress = Progress([mine], directory)
    if rank == 0:
        os.write(report, REPORT.pack(-1))
    saver = checkpoint.Saver(directory, keep_last=3, keep_every=100)
    start, end = _ROWS * rank // world_size, _ROWS * (rank + 1) // world_size
    while True:
        progress.begin_pass()
        batches = _batches(mine, batch_size)
        while samples := _of_all_ranks(next(batches, [])):
            progress.took(samples)
            part = checkpoint.shard(rows_of(progress.step)[start:end], start, (_ROWS, 512))
            saver.save(progress.state(), progress.step, sharded={"rows": part})
            saver.wait()
            if rank == 0:
                os.write(report, REPORT.pack(progress.step))


def _of_all_ranks(samples: list[int]) -> list[int]:
    gathered: list[int] = torch.cat(collectives.all_gather(torch.tensor(samples, dtype=torch.int64))).tolist()
    return gathered
