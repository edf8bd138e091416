"""Every strategy and option, alone and in pairs, against one process that does the work of all ranks.

    python -m tests.parallel.fsdp.matrix                  all worlds of 1 to 4 ranks, fifty steps a case
    python -m tests.parallel.fsdp.matrix --worlds 2 --steps 10

`cases_of` chooses combinations in which each value of each option meets each value of each other option.

With one or two ranks there is one order of summation, and every bit must agree. With more ranks, and for norms, there
are several: those cases run in float64, where an ulp is 2e-16, and must agree to 1e-9; a wrong factor or a lost
gradient is off by 1e-2. Such a case that computes in a narrower type must agree to 1e-4, for a value at a rounding
boundary may fall to either side.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dlaunch.parallel.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from dlaunch.parallel.fsdp.fully_shard import run_of
from dlaunch.parallel.fsdp.state import full_state_dict

from ..worlds import World
from .fsdp_models import OPTIMIZERS, Block, Net, assert_same, batches, net

GRAPHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "recomputed": {"recompute": False},
    "recomputed re-entrantly": {"recompute": True},
    "repeated": {"repeat": 2},
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "strategy": ("full", "root kept", "grad and optimizer", "no shard", "hybrid", "smaller world"),
    "transport": ("torch", "flat", "shared_memory"),
    "graph": tuple(GRAPHS),
    "optimizer": tuple(OPTIMIZERS),
    "clip": (None, 0.3),
    "narrow": (False, True),
    "offload": (False, True),
    "accumulate": ("no", "without communication", "with communication"),
    "units": ("blocks", "one", "nested", "wrapper"),
}
_PATIENCE_S = 600.0  # a case takes seconds, but the machine may be busy
MICRO = 2  # micro-batches where gradients are accumulated


class Case(NamedTuple):
    """One combination."""

    strategy: str = "full"
    transport: str = "torch"
    graph: str = "plain"
    optimizer: str = "sgd"
    clip: float | None = None
    narrow: bool = False
    offload: bool = False
    accumulate: str = "no"
    units: str = "blocks"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())


def options_for(size: int) -> dict[str, tuple[Any, ...]]:
    """Hybrid sharding and a smaller world need four ranks."""
    strategies = OPTIONS["strategy"] if size == 4 else OPTIONS["strategy"][:4]
    return {**OPTIONS, "strategy": strategies}


def cases_of(options: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Each option alone (all others at their first value), and combinations in which all pairs of values occur."""
    cases = [Case(**{name: value}) for name, values in options.items() for value in values]
    cases = list(dict.fromkeys(cases))
    missing = set(_all_pairs(options)) - {pair for case in cases for pair in _pairs_of(case)}
    while missing:
        case = _best(options, missing, min(missing, key=repr))
        cases.append(case)
        missing -= set(_pairs_of(case))
    return cases


def _all_pairs(options: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    for (one, values), (other, others) in itertools.combinations(options.items(), 2):
        for value, its in itertools.product(values, others):
            yield (one, value, other, its)


def _pairs_of(case: Case) -> Iterator[tuple[Any, ...]]:
    for (one, value), (other, its) in itertools.combinations(case._asdict().items(), 2):
        yield (one, value, other, its)


def _best(options: Mapping[str, Sequence[Any]], missing: set[tuple[Any, ...]], seed: tuple[Any, ...]) -> Case:
    """A combination with the pair ``seed``, and value for value with as many missing pairs as possible."""
    chosen = {seed[0]: seed[1], seed[2]: seed[3]}
    for name, values in options.items():
        if name not in chosen:

            def gain(value: Any, name: str = name) -> int:
                return len(missing & set(_pairs_of_some({**chosen, name: value}, options)))

            chosen[name] = max(values, key=gain)
    return Case(**chosen)


def _pairs_of_some(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    named = [(name, chosen[name]) for name in options if name in chosen]
    for (one, value), (other, its) in itertools.combinations(named, 2):
        yield (one, value, other, its)


# Types


class Types(NamedTuple):
    """In which a case is kept, computed and summed, and how far it may be off."""

    kept: torch.dtype
    computed: torch.dtype
    bound: float


def types_of(case: Case, size: int) -> Types:
    """See the module's text."""
    if size <= 2 and case.clip is None:
        return Types(torch.float32, torch.bfloat16 if case.narrow else torch.float32, 0.0)
    if case.narrow:
        return Types(torch.float64, torch.float32, 1e-4)
    return Types(torch.float64, torch.float64, 1e-9)


# The oracle


@lru_cache(maxsize=64)
def alone(
    graph: str, optimizer_name: str, clip: float | None, accumulate: str, types: Types, size: int, steps: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """What all ranks do, done by one process without any of our code: losses of each rank, and the parameters."""
    model = net(**GRAPHS[graph]).to(types.kept)
    worker = copy.deepcopy(model).to(types.computed)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses: list[list[float]] = [[] for _ in range(size)]
    for step in _micro_batches(accumulate, size, steps):
        copies = [[] for _ in range(size)]  # type: list[list[dict[str, Tensor]]]
        for tokens, targets in step:
            for rank in range(size):
                copies[rank].append(_gradients(model, worker, tokens[rank::size], targets[rank::size], losses[rank]))
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = _average([[part.get(name) for part in parts] for parts in copies], accumulate, types)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses, dict(model.state_dict())


def _gradients(model: Net, worker: Net, tokens: Tensor, targets: Tensor, losses: list[float]) -> dict[str, Tensor]:
    """Of the model's values in the worker's type."""
    worker.zero_grad()
    with torch.no_grad():
        for its, value in zip(worker.parameters(), model.parameters(), strict=True):
            its.copy_(value)
    loss = functional.cross_entropy(worker(tokens), targets)
    torch.autograd.backward(loss)
    losses.append(loss.item())
    return {name: p.grad for name, p in worker.named_parameters() if p.grad is not None}


def _average(ranks: list[list[Tensor | None]], accumulate: str, types: Types) -> Tensor | None:
    """Sums in the order in which the ranks make them: first of micro-batches, or first of ranks."""
    if accumulate == "with communication":
        micros = [_average([[part] for part in parts], "no", types) for parts in zip(*ranks, strict=True)]
        return _sum(micros)
    total = _sum([None if (whole := _sum(parts)) is None else whole.to(types.kept) for parts in ranks])
    return None if total is None else total / len(ranks)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    total = present[0].clone()
    for part in present[1:]:
        total += part
    return total


def _micro_batches(accumulate: str, size: int, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    count = 1 if accumulate == "no" else MICRO
    everything = iter(batches(steps * count, 4 * size))
    return iter([[next(everything) for _ in range(count)] for _ in range(steps)])


# Ours


def strategy_options(strategy: str) -> dict[str, Any]:
    """Arguments of ``fully_shard``."""
    world = dist.group.WORLD
    match strategy:
        case "no shard":
            return {"process_group": (None, world)}
        case "hybrid":
            return {"process_group": hybrid_groups()}
        case "smaller world":
            return {"reshard_after_forward": 2}
        case _:
            return {"reshard_after_forward": {"full": True, "root kept": None, "grad and optimizer": False}[strategy]}


@lru_cache(maxsize=1)
def hybrid_groups() -> tuple[Any, Any]:
    """Two and two of four ranks: this rank's group and its group across."""
    rank = dist.get_rank()
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return within[rank // 2], across[rank % 2]


def sharded(case: Case, types: Types) -> nn.Module:
    """The model of a case, sharded as it says."""
    model = net(**GRAPHS[case.graph]).to(types.kept)
    options = {
        **strategy_options(case.strategy),
        "transport": case.transport,
        "mp_policy": MixedPrecisionPolicy(types.computed, types.kept) if case.narrow else None,
        "offload_policy": CPUOffloadPolicy() if case.offload else OffloadPolicy(),
    }
    if case.units == "wrapper" and case.strategy not in {"hybrid", "smaller world"}:
        return wrapped(model, case, options)
    if case.units == "nested":
        for block in model.blocks:
            fully_shard(block.up, **options)
    for block in model.blocks if case.units != "one" else []:
        fully_shard(block, **options)
    return fully_shard(model, **options)


class _Strategy(NamedTuple):
    name: str


def wrapped(model: Net, case: Case, options: Mapping[str, Any]) -> nn.Module:
    """The same by the wrapping class."""
    names = {"grad and optimizer": "SHARD_GRAD_OP", "no shard": "NO_SHARD"}
    return FullyShardedDataParallel(
        model,
        sharding_strategy=_Strategy(names.get(case.strategy, "FULL_SHARD")),
        auto_wrap_policy={Block},
        mixed_precision=options["mp_policy"],
        cpu_offload=options["offload_policy"],
        transport=case.transport,
    )


def train(model: nn.Module, case: Case, rank: int, size: int, steps: int) -> list[float]:
    """Losses of this rank."""
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for step in _micro_batches(case.accumulate, size, steps):
        optimizer.zero_grad()
        for number, (tokens, targets) in enumerate(step):
            with ExitStack() as stack:
                if case.accumulate == "without communication" and number < len(step) - 1:
                    stack.enter_context(model.no_sync())  # type: ignore[operator]
                loss = functional.cross_entropy(model(tokens[rank::size]), targets[rank::size])
                torch.autograd.backward(loss)
            losses.append(loss.item())
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return losses


def compare(rank: int, size: int, case: Case, steps: int) -> None:
    """Raise AssertionError if the ranks do not do what one process does."""
    types = types_of(case, size)
    expected, parameters = alone(case.graph, case.optimizer, case.clip, case.accumulate, types, size, steps)
    model = sharded(case, types)
    losses = train(model, case, rank, size, steps)
    for step, (found, wanted) in enumerate(zip(losses, expected[rank], strict=True)):
        assert abs(found - wanted) <= types.bound * max(1.0, abs(wanted)), f"loss {step}: {found} is not {wanted}"
    inner = model.module if isinstance(model, FullyShardedDataParallel) else model
    assert_same(full_state_dict(inner, rank0_only=False), parameters, types.bound)
    run_of(inner).abandon()


def compare_many(rank: int, size: int, cases: Sequence[Case], steps: int) -> None:
    """All cases; the first that fails is named."""
    for case in cases:
        try:
            compare(rank, size, case, steps)
        except Exception as error:
            raise AssertionError(f"{size} ranks, {steps} steps: {case}") from error


def failures_of(rank: int, size: int, case: Case, steps: int) -> str:
    """What is wrong with a case, or nothing."""
    try:
        compare(rank, size, case, steps)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Every strategy and option, alone and in pairs, in worlds of 1 to 4.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    failed = 0
    for size in arguments.worlds:
        cases = cases_of(options_for(size))
        began = time.monotonic()
        world = World(size, collective_timeout_s=_PATIENCE_S)
        for number, case in enumerate(cases):
            print(f"{size} ranks, case {number + 1} of {len(cases)}", end="\r", file=sys.stderr, flush=True)
            try:
                answers = world.run(failures_of, size, case, arguments.steps, timeout_s=_PATIENCE_S)
                said = [answer for answer in answers if answer]
            except AssertionError as error:  # a rank died, or hung
                said = [str(error)]
            if said:
                failed += 1
                world.close()  # a rank may wait in a collective to which another no longer comes
                world = World(size, collective_timeout_s=_PATIENCE_S)
                print(f"FAILED {size} ranks: {case}\n{said[0]}", flush=True)
        world.close()
        print(
            f"{size} ranks: {len(cases)} cases of {arguments.steps} steps, {time.monotonic() - began:.0f} s", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
