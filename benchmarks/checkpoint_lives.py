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

EPOCH = range(997)
SEED = 3
REPORT = struct.Struct("<q")  # a step that was published; -1 when the last checkpoint is loaded
_ROWS = 13


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


class Progress:
    """How far training has come, and which samples of the epoch were delivered."""

    def __init__(self, samplers: list[ElasticDistributedSampler], directory: Path) -> None:
        self.samplers = samplers  # of this process's ranks; the first has a batch whenever any rank has
        self.step, self.epochs = 0, 0
        self.delivered: list[int] = []
        found = checkpoint.load(directory)
        if found is not None:
            self.step, self.epochs = found.step, found.state["epochs"]
            self.delivered = found.state["delivered"].tolist()
            for sampler in samplers:
                sampler.load_state_dict(found.state["sampler"])

    def begin_pass(self) -> None:
        """The next epoch, if the present one is complete."""
        if self.samplers[0].position == len(EPOCH):
            self.delivered = []
            for sampler in self.samplers:
                sampler.set_epoch(sampler.epoch + 1)

    def took(self, samples: list[int]) -> None:
        """All ranks together trained on ``samples`` in one step."""
        expected = order_of(self.samplers[0].epoch)[len(self.delivered) :][: len(samples)]
        assert sorted(samples) == sorted(expected), f"step {self.step + 1} has the samples {samples}, not {expected}"
        self.delivered += samples
        self.step += 1
        if self.samplers[0].position == len(EPOCH):
            assert sorted(self.delivered) == list(EPOCH), f"an epoch ended after {len(self.delivered)} samples"
            self.epochs += 1

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "weights": weights_of(self.step),
            "sampler": self.samplers[0],
            "delivered": torch.tensor(self.delivered),
            "epochs": self.epochs,
        }


def live_alone(directory: Path, report: int, rng: random.Random) -> NoReturn:
    """Train and save for ever; the ranks of a world take turns in one process."""
    world_size, batch_size = rng.randint(1, 6), rng.randint(1, 60)
    samplers = [ElasticDistributedSampler(EPOCH, world_size, rank, seed=SEED) for rank in range(world_size)]
    progress = Progress(samplers, directory)
    os.write(report, REPORT.pack(-1))
    saver = checkpoint.Saver(directory, keep_last=3, keep_every=100)
    draw = _by_loader if rng.random() < 0.5 else _by_hand
    while True:
        progress.begin_pass()
        for samples in draw(samplers, batch_size):
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


def _by_loader(samplers: list[ElasticDistributedSampler], batch_size: int) -> Iterator[list[int]]:
    """The same through a loader for each rank."""
    passes = [_batches(sampler, batch_size) for sampler in samplers]
    while step := [index for batches in passes for index in next(batches, [])]:
        yield step


def _batches(sampler: ElasticDistributedSampler, batch_size: int) -> Iterator[list[int]]:
    loader: DataLoader[int] = DataLoader(EPOCH, batch_size, sampler=sampler)  # type: ignore[arg-type]
    for batch in sampler.batches(loader):
        yield batch.tolist()


def live_together(
    directory: Path, report: int, rng: random.Random, rank: int, world_size: int, store: Path
) -> NoReturn:
    """Train and save for ever as one rank of several processes, each with rows of its own to save."""
    batch_size = rng.randint(1, 60)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
    )
    sampler = ElasticDistributedSampler(EPOCH, seed=SEED)
    progress = Progress([sampler], directory)
    if rank == 0:
        os.write(report, REPORT.pack(-1))
    saver = checkpoint.Saver(directory, keep_last=3, keep_every=100)
    start, end = _ROWS * rank // world_size, _ROWS * (rank + 1) // world_size
    while True:
        progress.begin_pass()
        batches = _batches(sampler, batch_size)
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
