"""A training step with our DistributedDataParallel beside torch's, in one run: ratios of medians, and where time goes.

    python benchmarks/parallel_ddp.py --world-size 2 --rounds 10 --steps 5

All contestants of a model live in the same processes and take turns, so a noisy machine disturbs them alike. Each rank
has one thread. The floor is the same step without any communication.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import contest
import torch
import torch.distributed as dist
from parallel_models import MODELS
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dlaunch.parallel import DistributedDataParallel, NaiveDistributedDataParallel

BASELINE = "torch default"


def torch_best(module: nn.Module) -> nn.Module:
    return TorchDDP(module, gradient_as_bucket_view=True, static_graph=True)


CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BASELINE: TorchDDP,
    "torch view+static": torch_best,
    "ours gloo": lambda module: DistributedDataParallel(module, transport="torch"),
    "ours shared memory": lambda module: DistributedDataParallel(module, transport="shared_memory"),
    "naive": NaiveDistributedDataParallel,
    "floor": lambda module: module,
}


def make_step(name: str, model_name: str, rank: int) -> tuple[Callable[[], None], nn.Module]:
    torch.manual_seed(0)
    make, sample = MODELS[model_name]
    model = CONTESTANTS[name](make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        inputs, targets = sample(generator)
        optimizer.zero_grad()
        loss: Tensor = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step, model


def measure(model_name: str, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of each step, on the clock and of this rank's processor, in an order that changes from round to round."""
    rank = dist.get_rank()
    runs = {name: make_step(name, model_name, rank) for name in names}
    for step, _ in runs.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for name in contest.turns(names, rounds, steps):
        began, processor_began = time.perf_counter(), time.process_time()
        runs[name][0]()
        times[name].append(time.perf_counter() - began)
        processor[name].append(time.process_time() - processor_began)
    logs = {name: model.logging_data() for name, (_, model) in runs.items() if hasattr(model, "logging_data")}
    return {"seconds": times, "processor": processor, "logs": logs}


def report(result: dict[str, Any]) -> dict[str, Any]:
    medians = {name: statistics.median(seconds) for name, seconds in result["seconds"].items()}
    processor = {name: statistics.median(seconds) for name, seconds in result["processor"].items()}
    base = medians.get(BASELINE)
    for name, median in medians.items():
        ratio = f"{median / base:6.2f} x" if base else ""
        log = result["logs"].get(name)
        parts = ""
        if log:
            exposed, overlapped = log["avg_backward_exposed_comm_time"], log["avg_backward_compute_comm_overlap_time"]
            parts = f"  waited {exposed / 1e6:.1f} ms, overlapped {overlapped / 1e6:.1f} ms"
        print(
            f"  {name:20} {median * 1e3:8.1f} ms {ratio}  processor {processor[name] * 1e3:7.1f} ms{parts}", flush=True
        )
    return {"median_s": medians, "processor_s": processor}


def main() -> None:
    flags = contest.parser("Compare data-parallel classes on the same models.", list(MODELS), CONTESTANTS)
    contest.hold(contest.Contest("parallel_ddp", measure, report), flags.parse_args())


if __name__ == "__main__":
    main()
