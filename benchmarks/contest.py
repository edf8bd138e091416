"""A contest of ways to train the same models: its command line, its ranks, whose turn it is, and who won.

Time: all contestants of a model live in the same processes and take turns, so a noisy machine disturbs them alike. A
ratio is the median over the rounds of a contestant's median step to the baseline's in the same round; beside it stand
the quartiles over the rounds. Only a figure whose quartiles are close is worth telling.

Memory: each contestant trains in processes of its own, in turns, several times. What counts is the largest rank's
proportional memory (a page that processes share is divided by their number) above what it was before there was a model,
at its peak and at rest between steps. What glibc keeps of freed memory differs from run to run, for every contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peak import Peak, proportional_bytes

MEMORY_STEPS = 8


class Result(NamedTuple):
    """What one rank measured of one contestant."""

    seconds: list[float]  # of each step, round by round
    notes: Mapping[str, float]  # of a step in the middle; what they are is the contest's affair


class Memory(NamedTuple):
    """Bytes of one rank above those of the bare process."""

    resting: int
    peak: int


class Contest(NamedTuple):
    """What is compared. The functions must be found by their names in the ranks' processes."""

    name: str  # in the file of results
    baseline: str
    measure: Callable[[str, list[str], int, int], dict[str, Result]]  # a model, contestants, rounds, steps of a turn
    budgets: Mapping[tuple[str, str], float]  # the largest ratio allowed, by model and contestant
    make_step: Callable[[str, str, int], Callable[[], None]]  # for memory: a contestant, a model, this rank
    memory_baseline: str
    lean: Collection[str]  # who may have no higher a peak than that


def parser(description: str, models: Sequence[str], contestants: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that all contests have."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--world-size", type=int, nargs="+", default=[2, 4], help="one or several, one after another")
    flags.add_argument("--rounds", type=int, default=10)
    flags.add_argument("--steps", type=int, default=4, help="steps of one contestant in one round")
    flags.add_argument("--models", nargs="+", choices=models, default=list(models))
    flags.add_argument("--contestants", nargs="+", choices=contestants, default=list(contestants))
    flags.add_argument("--memory", action="store_true", help="measure memory, not time")
    flags.add_argument("--runs", type=int, default=5, help="of each contestant, with --memory")
    flags.add_argument("--json", type=Path, help="append results to this file, a JSON object a line")
    return flags


def hold(contest: Contest, arguments: argparse.Namespace) -> None:
    """Measure and report one world after the other, and in it one model after the other."""
    for world_size in arguments.world_size:
        if not arguments.memory:
            on_ranks(_take_part, world_size, contest, arguments)
            continue
        for model in arguments.models:
            print(f"\nmemory, {model}, {world_size} ranks", flush=True)
            figures = _compare_memory(contest, model, world_size, arguments)
            _append(arguments.json, f"{contest.name}_memory", model, world_size, figures)


def _take_part(rank: int, world_size: int, store: str, contest: Contest, arguments: argparse.Namespace) -> None:
    join(rank, world_size, store)
    for model in arguments.models:
        results = contest.measure(model, arguments.contestants, arguments.rounds, arguments.steps)
        if rank == 0:
            print(f"\n{model}, {world_size} ranks", flush=True)
            figures = _report(contest, model, results, arguments.steps)
            _append(arguments.json, contest.name, model, world_size, figures)
    leave()


def _append(path: Path | None, benchmark: str, model: str, world_size: int, figures: dict[str, Any]) -> None:
    if path is not None:
        entry = {"benchmark": benchmark, "model": model, "world_size": world_size, "contestants": figures}
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _report(contest: Contest, model: str, results: Mapping[str, Result], steps: int) -> dict[str, Any]:
    """Print a line for each contestant; returns the figures."""
    figures: dict[str, Any] = {}
    base = _by_round(results[contest.baseline].seconds, steps) if contest.baseline in results else None
    for name, (seconds, notes) in results.items():
        middle = median(seconds)
        figures[name] = {"median_s": middle, **notes}
        told = ""
        if base is not None:
            ratios = [own / other for own, other in zip(_by_round(seconds, steps), base, strict=True)]
            low, ratio, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            figures[name]["ratio"] = [low, ratio, high]
            told = f"{ratio:6.2f} x ({low:.2f}-{high:.2f})  {_verdict(contest.budgets.get((model, name)), ratio):16}"
        parts = ", ".join(f"{what} {value * 1e3:.1f}" for what, value in notes.items())
        print(f"  {name:20} {middle * 1e3:8.1f} ms {told} {parts}", flush=True)
    return figures


def _by_round(seconds: Sequence[float], steps: int) -> list[float]:
    return [median(seconds[begin : begin + steps]) for begin in range(0, len(seconds), steps)]


def _verdict(budget: float | None, ratio: float) -> str:
    if budget is None:
        return ""
    return f"{'met' if ratio <= budget else 'MISSED'}: <= {budget:.2f} x"


def _compare_memory(contest: Contest, model: str, world_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants in turn, and print a line for each; returns the figures, in bytes."""
    runs: dict[str, list[Memory]] = {name: [] for name in arguments.contestants}
    for _ in range(arguments.runs):
        for name, memories in runs.items():
            with tempfile.TemporaryDirectory() as directory:
                on_ranks(_measure_memory, world_size, contest, name, model, directory)
                ranks = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(world_size)]
            memories.append(Memory(*map(max, zip(*ranks, strict=True))))
    base = median(memory.peak for memory in runs[contest.memory_baseline]) if contest.memory_baseline in runs else None
    for name, memories in runs.items():
        peaks = sorted(memory.peak / 1e6 for memory in memories)
        resting = median(memory.resting for memory in memories) / 1e6
        told = "" if base is None else f"{median(peaks) * 1e6 / base:6.2f} x  "
        if base is not None and name in contest.lean:
            told += _verdict(1.0, median(peaks) * 1e6 / base)
        spread = f"({peaks[0]:.0f}-{peaks[-1]:.0f})"
        print(f"  {name:20} peak {median(peaks):6.0f} MB {spread:13} at rest {resting:6.0f} MB {told}", flush=True)
    return {name: [memory._asdict() for memory in memories] for name, memories in runs.items()}


def _measure_memory(
    rank: int, world_size: int, store: str, contest: Contest, name: str, model: str, directory: str
) -> None:
    join(rank, world_size, store)
    dist.barrier()
    bare = proportional_bytes()
    step = contest.make_step(name, model, rank)
    step()
    with Peak() as peak:
        for _ in range(MEMORY_STEPS):
            step()
    dist.barrier()
    Path(directory, str(rank)).write_text(json.dumps(Memory(proportional_bytes() - bare, peak.highest - bare)))
    leave()


def turns(names: Sequence[str], rounds: int, steps: int) -> Iterator[str]:
    """Whose step is next, in an order that changes from round to round; all ranks begin a turn together."""
    for number in range(rounds):
        for place in range(len(names)):
            dist.barrier()
            for _ in range(steps):
                yield names[(place + number) % len(names)]


def on_ranks(work: Callable[..., None], world_size: int, *arguments: object) -> None:
    """Call ``work(rank, world_size, store, *arguments)`` in processes of their own; ``store`` is for `join`."""
    with tempfile.TemporaryDirectory() as directory:
        everything = (world_size, f"{directory}/store", *arguments)
        mp.start_processes(work, args=everything, nprocs=world_size, start_method="spawn")


def join(rank: int, world_size: int, store: str) -> None:
    """Become a rank of a gloo process group, with one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)


def leave() -> NoReturn:
    """End this rank when all have come here."""
    dist.barrier()
    os._exit(0)  # torch's reducers would join gloo's threads while they hold the interpreter's lock
