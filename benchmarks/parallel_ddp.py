"""A training step with our DistributedDataParallel beside torch's, in one run: ratios of medians, and where time goes.

    python benchmarks/parallel_ddp.py --world-size 2 --rounds 10 --steps 5

All contestants of a model live in the same processes and take turns, so a noisy machine disturbs them alike. Each rank
has one thread. The floor is the same step without any communication.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            dist.barrier()
            for _ in range(steps):
                began, processor_began = time.perf_counter(), time.process_time()
                runs[name][0]()
                times[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - processor_began)
    logs = {name: model.logging_data() for name, (_, model) in runs.items() if hasattr(model, "logging_data")}
    return {"seconds": times, "processor": processor, "logs": logs}


def work(rank: int, world_size: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    for model_name in arguments.models:
        result = measure(model_name, arguments.contestants, arguments.rounds, arguments.steps)
        if rank == 0:
            report(model_name, world_size, result, arguments.json)
    dist.barrier()
    os._exit(0)  # torch's reducers would join gloo's threads while they hold the interpreter's lock


def report(model_name: str, world_size: int, result: dict[str, Any], json_file: Path | None) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in result["seconds"].items()}
    processor = {name: statistics.median(seconds) for name, seconds in result["processor"].items()}
    base = medians.get(BASELINE)
    print(f"\n{model_name}, {world_size} ranks")
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
    if json_file is not None:
        entry = {
            "benchmark": "parallel_ddp",
            "model": model_name,
            "world_size": world_size,
            "median_s": medians,
            "processor_s": processor,
        }
        with json_file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare data-parallel classes on the same models.")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps of one contestant in one round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--json", type=Path, help="append results to this file, a JSON object a line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(
            work,
            args=(arguments.world_size, f"{directory}/store", arguments),
            nprocs=arguments.world_size,
            start_method="spawn",
        )


if __name__ == "__main__":
    main()
