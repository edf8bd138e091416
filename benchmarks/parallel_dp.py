"""What a training step costs in DataParallel and in DistributedDataParallel, beside the plain module.

    python benchmarks/parallel_dp.py [--rounds 11]

One whole batch in the plain module, in DataParallel over two CPU replicas, and split between two ranks in ours over
gloo; one thread each, taken in turn. Shown: medians and quartiles of the ratios to the plain module of the same round,
in wall time and in CPU time of all processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlaunch.parallel import DataParallel, DistributedDataParallel

STEPS = 4  # in a round
RANKS = 2


class Cost(NamedTuple):
    """Of one step."""

    wall_s: float
    cpu_s: float


class Case(NamedTuple):
    """A model, and the shape of one sample of its input."""

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int


def _mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * 28 * 28, 10))


def _transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), 4)


CASES = {
    "MLP 8 x 1024": Case(_mlp, (1024,), 64),
    "convolutions": Case(_convolutions, (3, 32, 32), 32),
    "transformer": Case(_transformer, (64, 256), 16),
}


class Training:
    """A wrapped model with its optimizer and the batch that it trains on."""

    def __init__(self, case: Case, wrap: Callable[[nn.Module], nn.Module], shares: int) -> None:
        torch.manual_seed(0)
        self.model = wrap(case.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batch: Tensor = torch.randn(case.batch // shares, *case.sample)

    def round(self) -> Cost:
        """Some steps, and what one of them costs this process."""
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
        return Cost((time.perf_counter() - began) / STEPS, (time.process_time() - cpu_began) / STEPS)


def rank_main(rank: int, store: str, pipe: Connection) -> None:
    """A rank: does a round of the case that it is told, until it is told None."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    trainings = {name: Training(case, DistributedDataParallel, RANKS) for name, case in CASES.items()}
    while (name := pipe.recv()) is not None:
        pipe.send(tuple(trainings[name].round()))


def round_of_ranks(pipes: list[Connection], name: str) -> Cost:
    """One round on all ranks: the slowest one's time, and the CPU time of all."""
    for pipe in pipes:
        pipe.send(name)
    costs = [Cost(*pipe.recv()) for pipe in pipes]
    return Cost(max(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs))


def compare(pipes: list[Connection], name: str, rounds: int) -> None:
    """Print one line for wall time and one for CPU time."""
    plain = Training(CASES[name], lambda module: module, 1)
    replicated = Training(CASES[name], lambda module: DataParallel(module, ["cpu", "cpu"]), 1)
    taken = [(plain.round(), replicated.round(), round_of_ranks(pipes, name)) for _ in range(rounds + 1)][1:]
    for field in Cost._fields:
        alone, dp, ddp = ([getattr(cost, field) for cost in column] for column in zip(*taken, strict=True))
        ratios = f"DataParallel {_quartiles(dp, alone)}  DDP {_quartiles(ddp, alone)}"
        print(f"{name:14} {field:7} plain {statistics.median(alone) * 1e3:6.1f} ms  {ratios}", flush=True)


def _quartiles(top: list[float], bottom: list[float]) -> str:
    low, middle, high = statistics.quantiles((a / b for a, b in zip(top, bottom, strict=True)), n=4)
    return f"{middle:.2f} x ({low:.2f}-{high:.2f})"


def main() -> None:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description="Cost of a step in DataParallel and DDP beside the plain module.")
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(RANKS)]
        for rank, (_, theirs) in enumerate(ends):
            context.Process(target=rank_main, args=(rank, f"{folder}/store", theirs), daemon=True).start()
        pipes = [ours for ours, _ in ends]
        for name in CASES:
            compare(pipes, name, rounds)
        for pipe in pipes:
            pipe.send(None)


if __name__ == "__main__":
    main()
