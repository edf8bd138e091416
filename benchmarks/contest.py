"""A contest of ways to train the same models: its command line, its ranks, and whose turn it is."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Contest(NamedTuple):
    """What is compared. Both functions must be found by their names in the ranks' processes."""

    name: str  # in the file of results
    measure: Callable[[str, list[str], int, int], Any]  # a model, contestants, rounds, steps of one in one round
    report: Callable[[Any], dict[str, Any]]  # prints what was measured; returns what of it goes to the file


def parser(description: str, models: Sequence[str], contestants: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that all contests have."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--world-size", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=10)
    flags.add_argument("--steps", type=int, default=4, help="steps of one contestant in one round")
    flags.add_argument("--models", nargs="+", choices=models, default=list(models))
    flags.add_argument("--contestants", nargs="+", choices=contestants, default=list(contestants))
    flags.add_argument("--json", type=Path, help="append results to this file, a JSON object a line")
    return flags


def hold(contest: Contest, arguments: argparse.Namespace) -> None:
    """Measure and report one model after the other."""
    on_ranks(_take_part, arguments.world_size, contest, arguments)


def _take_part(rank: int, world_size: int, store: str, contest: Contest, arguments: argparse.Namespace) -> None:
    join(rank, world_size, store)
    for model in arguments.models:
        result = contest.measure(model, arguments.contestants, arguments.rounds, arguments.steps)
        if rank == 0:
            print(f"\n{model}, {world_size} ranks")
            entry = {"benchmark": contest.name, "model": model, "world_size": world_size, **contest.report(result)}
            if arguments.json is not None:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
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
