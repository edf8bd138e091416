"""A training step and its memory with our fully_shard beside torch's FSDP2 and FSDP1, in one run: ratios of medians.

    python benchmarks/parallel_fsdp.py --world-size 2 --rounds 10 --steps 4
    python benchmarks/parallel_fsdp.py --memory

All contestants of a model live in the same processes and take turns, so a noisy machine disturbs them alike. Each rank
has one thread. ``cpu`` is the processor time of a rank's step, of all its threads: what is left to compare when the
machine is too busy for the clock. The floor is the same step without communication on a whole model: FSDP cannot come
under it except by its optimizer, which steps on a part. With ``--memory`` each contestant has processes of its own, and
the peak of the ranks' proportional memory (each shared page counted once) above that of the bare process is measured.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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


def measure(model_name: str, names: list[str], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step's parts for each contestant; the order changes from round to round."""
    rank = dist.get_rank()
    names = [name for name in names if name in TIMED]
    runs = {name: make_step(name, model_name, rank) for name in names}
    for step, parts in runs.values():
        for _ in range(3):
            step()
        parts.seconds = {part: [] for part in parts.seconds}
    for name in contest.turns(names, rounds, steps):
        runs[name][0]()
    return {
        name: {part: statistics.median(seconds) for part, seconds in parts.seconds.items()}
        for name, (_, parts) in runs.items()
    }


def report(result: dict[str, dict[str, float]]) -> dict[str, Any]:
    base = result.get(BASELINE, {}).get("step")
    for name, parts in result.items():
        ratio = f"{parts['step'] / base:6.2f} x" if base else ""
        told = ", ".join(f"{part} {parts[part] * 1e3:.1f}" for part in ("forward", "backward", "optimizer", "cpu"))
        print(f"  {name:20} {parts['step'] * 1e3:8.1f} ms {ratio}   {told}", flush=True)
    return {"median_s": result}


# Memory


def proportional_bytes() -> int:
    """This process's memory, with each page that several processes share divided by their number."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


class Peak:
    """The highest proportional memory, watched by a thread."""

    def __init__(self) -> None:
        self.highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, proportional_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_memory(rank: int, world_size: int, store: str, name: str, model_name: str, answer: str) -> None:
    contest.join(rank, world_size, store)
    dist.barrier()
    bare = proportional_bytes()
    step, _ = make_step(name, model_name, rank, adam=True)
    step()
    with Peak() as peak:
        for _ in range(6):
            step()
    dist.barrier()
    resting = proportional_bytes()
    Path(f"{answer}.{rank}").write_text(json.dumps([resting - bare, peak.highest - bare]))
    contest.leave()


def report_memory(model_name: str, world_size: int, names: Iterable[str]) -> None:
    print(f"\n{model_name} with Adam, {world_size} ranks: MB of the largest rank, between steps and at the peak")
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            contest.on_ranks(measure_memory, world_size, name, model_name, f"{directory}/answer")
            ranks = [json.loads(Path(f"{directory}/answer.{rank}").read_text()) for rank in range(world_size)]
        resting, peak = (max(column) / 1e6 for column in zip(*ranks, strict=True))
        print(f"  {name:20} {resting:8.0f} {peak:8.0f}", flush=True)


def main() -> None:
    flags = contest.parser("Compare sharded classes on the same models.", ["gpt", "mlp"], CONTESTANTS)
    flags.add_argument("--memory", action="store_true", help="measure memory, not time")
    arguments = flags.parse_args()
    if arguments.memory:
        for model_name in arguments.models:
            report_memory(model_name, arguments.world_size, arguments.contestants)
        return
    contest.hold(contest.Contest("parallel_fsdp", measure, report), arguments)


if __name__ == "__main__":
    main()
