"""A training step and its memory with our fully_shard beside torch's FSDP2 and FSDP1, in one run: ratios of medians.

    python benchmarks/parallel_fsdp.py --world-size 2 4 --rounds 10 --steps 4
    python benchmarks/parallel_fsdp.py --memory

Each rank has one thread. ``cpu`` is the processor time of a rank's step, of all its threads: what is left to compare
when the machine is too busy for the clock. The floor is the same step without communication on a whole model: FSDP
cannot come under it except by its optimizer, which steps on a part. Memory is measured with Adam.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import contest
import torch
import torch.distributed as dist
from parallel_models import MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

from dlaunch.parallel.fsdp import fully_shard

BASELINE = "torch FSDP2"


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The layers that are units beside the root."""
    return [part for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer)] or [
        part for part in module.children() if isinstance(part, nn.Linear)
    ]


def torch_fsdp2(module: nn.Module) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(module):
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(module, mesh=mesh)


def torch_fsdp1(module: nn.Module) -> nn.Module:
    kinds = {type(block) for block in blocks_of(module)}
    return TorchFSDP1(
        module, auto_wrap_policy=ModuleWrapPolicy(kinds), use_orig_params=True, device_id=torch.device("cpu")
    )


def ours(module: nn.Module, transport: str, one_unit: bool = False) -> nn.Module:
    for block in [] if one_unit else blocks_of(module):
        fully_shard(block, transport=transport)
    return fully_shard(module, transport=transport)


CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    BASELINE: torch_fsdp2,
    "torch FSDP1": torch_fsdp1,
    "ours gloo": partial(ours, transport="torch"),
    "ours shared memory": partial(ours, transport="shared_memory"),
    "ours gloo, one unit": partial(ours, transport="torch", one_unit=True),
    "floor": lambda module: module,
}
TIMED = [name for name in CONTESTANTS if "one unit" not in name]
BUDGETS = {
    ("gpt", "ours gloo"): 0.9,
    ("gpt", "ours shared memory"): 0.8,
    ("mlp", "ours gloo"): 0.3,
    ("mlp", "ours shared memory"): 0.25,
}


class Parts:
    """Seconds of a step by what it did."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "step": [], "cpu": []}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long what is within takes."""
        began = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - began)


def make_step(name: str, model_name: str, rank: int, adam: bool = False) -> tuple[Callable[[], None], Parts]:
    torch.manual_seed(0)
    make, sample = MODELS[model_name]
    model = CONTESTANTS[name](make())
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(parameters, lr=0.001) if adam else torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
    )
    generator = torch.Generator().manual_seed(rank)
    parts = Parts()

    def step() -> None:
        inputs, targets = sample(generator)
        cpu_before = time.process_time()
        with parts.timed("step"):
            optimizer.zero_grad()
            with parts.timed("forward"):
                loss: Tensor = functional.cross_entropy(model(inputs), targets)
            with parts.timed("backward"):
                loss.backward()
            with parts.timed("optimizer"):
                optimizer.step()
        parts.seconds["cpu"].append(time.process_time() - cpu_before)

    return step, parts


def measure(model_name: str, names: list[str], rounds: int, steps: int) -> dict[str, contest.Result]:
    """Seconds of each step, in an order that changes from round to round."""
    rank = dist.get_rank()
    names = [name for name in names if name in TIMED]
    runs = {name: make_step(name, model_name, rank) for name in names}
    for step, parts in runs.values():
        for _ in range(3):
            step()
        parts.seconds = {part: [] for part in parts.seconds}
    for name in contest.turns(names, rounds, steps):
        runs[name][0]()
    return {name: _result(parts.seconds) for name, (_, parts) in runs.items()}


def _result(seconds: dict[str, list[float]]) -> contest.Result:
    told = ("forward", "backward", "optimizer", "cpu")
    return contest.Result(seconds["step"], {part: median(seconds[part]) for part in told})


def step_for_memory(name: str, model_name: str, rank: int) -> Callable[[], None]:
    return make_step(name, model_name, rank, adam=True)[0]


def main() -> None:
    flags = contest.parser("Compare sharded classes on the same models.", ["gpt", "mlp"], CONTESTANTS)
    lean = ("ours gloo", "ours shared memory")
    held = contest.Contest("parallel_fsdp", BASELINE, measure, BUDGETS, step_for_memory, BASELINE, lean)
    contest.hold(held, flags.parse_args())


if __name__ == "__main__":
    main()
