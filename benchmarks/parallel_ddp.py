"""A training step with our DistributedDataParallel beside torch's, in one run: ratios of medians, and where time goes.

    python benchmarks/parallel_ddp.py --world-size 2 4 --rounds 10 --steps 4
    python benchmarks/parallel_ddp.py --memory --models mlp

Each rank has one thread. The floor is the same step without any communication. Beside the ratio, milliseconds of a
step: ``processor`` of all threads of the rank, and of ours what it ``waited`` for communication after the backward and
what was ``overlapped`` with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
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


BUDGETS = {
    **{(model, "ours gloo"): 1.0 for model in MODELS},
    ("gpt", "ours shared memory"): 0.95,
    ("resnet", "ours shared memory"): 0.95,
    ("mlp", "ours shared memory"): 0.75,
}


def measure(model_name: str, names: list[str], rounds: int, steps: int) -> dict[str, contest.Result]:
    """Seconds of each step, in an order that changes from round to round."""
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
    return {
        name: contest.Result(times[name], {"processor": median(processor[name]), **_where_time_went(model)})
        for name, (_, model) in runs.items()
    }


def _where_time_went(model: Any) -> dict[str, float]:
    if not isinstance(model, DistributedDataParallel):
        return {}
    log = model.logging_data()
    waited, overlapped = log["avg_backward_exposed_comm_time"], log["avg_backward_compute_comm_overlap_time"]
    return {"waited": waited / 1e9, "overlapped": overlapped / 1e9}


def step_for_memory(name: str, model_name: str, rank: int) -> Callable[[], None]:
    return make_step(name, model_name, rank)[0]


def main() -> None:
    flags = contest.parser("Compare data-parallel classes on the same models.", list(MODELS), CONTESTANTS)
    lean = ("ours gloo", "ours shared memory")
    held = contest.Contest("parallel_ddp", BASELINE, measure, BUDGETS, step_for_memory, "torch view+static", lean)
    contest.hold(held, flags.parse_args())


if __name__ == "__main__":
    main()
