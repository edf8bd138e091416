"""What users may do with DDP, alone and in pairs, against the naive class and against one process.

[Note: bounds of the matrix]
With one or two ranks each sum has one order, so ours must agree with the naive class to the last bit. With more, and
against one process that sees the whole batch (whose matrix products sum in another order), each step rounds
differently by some units in the last place. Such differences add up like a random walk, so after n steps the bound is
``2 * sqrt(n) * log2(ranks + 1)`` units of the narrowest type in the model, relative to the tensor's largest element
or 1. What was seen is half of that at most; a wrong or missing average is off by tens of per cent.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlaunch.parallel import (
    DistributedDataParallel,
    MixedPrecision,
    NaiveDistributedDataParallel,
    SyncBatchNorm,
    allreduce_hook,
    fp16_compress_hook,
)
from dlaunch.parallel.transport.byte_gather import all_gather_bytes

from .ddp_models import Everything, batches, loss_of

ROWS = 4  # of one rank in one step


@dataclass(frozen=True)
class Feature:
    """One thing that a user may do: arguments of DDP and of the model, and a way to train.

    Attributes:
        kind: of two features of one kind only one can be chosen.
        excludes: names of features that cannot be combined with it, with torch's class neither.
        precision: rounding that it brings, relative, where that is more than the types' own.
    """

    name: str
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    way: bool = False
    kind: str = ""
    excludes: frozenset[str] = frozenset()
    precision: float = 0.0


def way(name: str, *excludes: str, precision: float = 0.0) -> Feature:
    return Feature(name, way=True, excludes=frozenset(excludes), precision=precision)


def of_type(dtype: torch.dtype) -> Feature:
    # Where the backend or an optimizer knows no sparse gradients of a type, the embedding's are dense.
    sparse = dtype is torch.float64
    name = str(dtype).removeprefix("torch.")
    excludes = frozenset({"batch norm", "synchronised batch norm", "narrow wire", "narrow parameters", "autocast"})
    return Feature(
        name,
        model={"dtype": dtype, "sparse": sparse},
        kind="type",
        excludes=excludes if dtype.is_complex else frozenset(),
    )


NARROW = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
HALF = torch.finfo(torch.float16).eps
BRAIN = torch.finfo(torch.bfloat16).eps

FEATURES = [
    Feature("small buckets", ddp={"bucket_cap_mb": 0.0002}, kind="buckets"),
    Feature("bucket list", ddp={"bucket_cap_mb_list": [0.0001, 0.0004]}, kind="buckets"),
    Feature("own gradients", ddp={"gradient_as_bucket_view": False}),
    Feature("find unused", ddp={"find_unused_parameters": True}, model={"unused": True}, kind="unused"),
    Feature(
        "skip unused",
        ddp={"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        model={"unused": True},
        kind="unused",
    ),
    Feature(
        "static graph",
        ddp={"static_graph": True},
        model={"unused": True},
        kind="unused",
        excludes=frozenset({"freeze later"}),
    ),
    Feature("no buffers", ddp={"forward_sync_buffers": False}),
    Feature("delayed", ddp={"delay": True}),
    Feature("narrow wire", ddp={"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}, precision=HALF),
    Feature("narrow parameters", ddp={"mixed_precision": NARROW}, precision=BRAIN),
    Feature("dense embedding", model={"sparse": False}),
    Feature("checkpoint", model={"recompute": False}, kind="recompute"),
    Feature(
        "re-entrant checkpoint",
        model={"recompute": True},
        kind="recompute",
        excludes=frozenset({"find unused", "skip unused", "two forwards"}),
    ),
    Feature("batch norm", model={"norm": True}, kind="norm"),
    Feature("synchronised batch norm", model={"norm": True}, kind="norm"),
    way("no_sync"),
    way("two forwards"),
    way("two backwards"),
    way("zeros, not none"),
    way("keep gradients"),
    way("freeze later"),
    way("hook", "compressing hook"),
    way("compressing hook", precision=HALF),
    way("adam"),
    way("clip"),
    way("evaluate"),
    way("join"),
    way("rebuild"),
    way("autocast", precision=BRAIN),
    *map(of_type, (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)),
]
BY_NAME = {feature.name: feature for feature in FEATURES}
Case = tuple[str, ...]


def compatible(first: Feature, second: Feature) -> bool:
    same_kind = bool(first.kind) and first.kind == second.kind
    return not same_kind and second.name not in first.excludes and first.name not in second.excludes


ALONE: list[Case] = [(), *((feature.name,) for feature in FEATURES)]
PAIRS: list[Case] = [
    (first.name, second.name) for first, second in itertools.combinations(FEATURES, 2) if compatible(first, second)
]


@dataclass(frozen=True)
class Trained:
    """A model after its last step."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


@dataclass
class Outcome:
    """What came of some cases.

    Attributes:
        failures: a sentence for each that failed.
        cases: how many were run.
        failed: how many of them failed, where failures were told already.
        worst: the largest difference against (the naive class, one process) as a part of the bound.
    """

    failures: list[str] = field(default_factory=list)
    cases: int = 0
    failed: int = 0
    worst: tuple[float, float] = (0.0, 0.0)


_oracles: dict[Any, Trained] = {}  # of this rank: many cases differ only in what the oracles do not know


def model_arguments(case: Case) -> dict[str, Any]:
    arguments: dict[str, Any] = {"norm": False, "depth": 1}
    for name in case:
        for key, value in BY_NAME[name].model.items():
            arguments[key] = value if key != "sparse" else value and arguments.get("sparse", True)
    return arguments


def make_network(case: Case, seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    return Everything(**model_arguments(case))


def shared_norms(network: Everything, case: Case) -> nn.Module:
    if "synchronised batch norm" not in case:
        return network
    converted: nn.Module = SyncBatchNorm.convert_sync_batchnorm(network)
    return converted


def train(model: nn.Module, case: Case, data: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    """Train in the ways of ``case``, a step for each batch of ``data``, and return what came of it."""
    named = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    if "adam" in case:  # not for sparse gradients; a smaller eps would magnify rounding
        dense = [p for name, p in named.items() if p.requires_grad and "embedding" not in name]
        optimizer: torch.optim.Optimizer = torch.optim.Adam(dense, lr=0.003, eps=0.01)
    else:
        optimizer = torch.optim.SGD(trained, lr=0.002)
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    with wrapper.join() if wrapper is not None and "join" in case else nullcontext():
        for number, (inputs, targets) in enumerate(data):
            if "freeze later" in case and number in (1, 2):
                named["blocks.0.0.weight"].requires_grad_(number == 2)
            if "rebuild" in case and number == len(data) // 2 and wrapper is not None:
                rebuild(wrapper, named)
            if "keep gradients" not in case or number % 5 == 0:
                optimizer.zero_grad(set_to_none="zeros, not none" not in case)
                for parameter in named.values():
                    if is_sparse(parameter.grad):
                        parameter.grad = None
            one_step(model, inputs, targets, case)
            if "clip" in case:
                nn.utils.clip_grad_norm_([p for p in trained if not p.is_complex() and not is_sparse(p.grad)], 1.0)
            optimizer.step()
            if "evaluate" in case:
                evaluate(model, inputs)
    return Trained(
        {name: parameter.detach().clone() for name, parameter in named.items()},
        {name: None if p.grad is None else p.grad.detach().to_dense().clone() for name, p in named.items()},
    )


def rebuild(model: DistributedDataParallel, named: Mapping[str, nn.Parameter]) -> None:
    """Into the same world; gradients, which a rebuild drops, are put back for those who keep them."""
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
    assert dist.group.WORLD is not None
    model.rebuild(dist.group.WORLD)
    for name, parameter in named.items():
        parameter.grad = gradients[name]


def is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def one_step(model: nn.Module, inputs: Tensor, targets: Tensor, case: Case) -> None:
    def loss_on(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case):
            return loss_of(model(rows), targets)

    if "no_sync" in case:
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():  # type: ignore[operator]
            torch.autograd.backward(loss_on(inputs * 0.5))
    loss = loss_on(inputs)
    if "two forwards" in case:
        loss = loss + loss_on(inputs * 2)
    second = loss_on(inputs - 1) if "two backwards" in case else None
    torch.autograd.backward(loss)
    if second is not None:
        torch.autograd.backward(second)


def evaluate(model: nn.Module, inputs: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(inputs)
    model.train()


def ours(case: Case, transport: str, rank: int, data: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    network = make_network(case, seed=rank)  # ranks begin differently: the first one's state must win
    arguments: dict[str, Any] = {"transport": transport}
    for name in case:
        arguments |= BY_NAME[name].ddp
    if {"narrow wire", "narrow parameters"} <= set(case):
        arguments["mixed_precision"] = replace(NARROW, reduce_dtype=torch.float16)
    if arguments.pop("delay", False):
        tied = network.get_parameter("tied.weight")
        arguments |= {"delay_all_reduce_named_params": [("tied.weight", tied)], "param_to_hook_all_reduce": tied}
    model = DistributedDataParallel(shared_norms(network, case), **arguments)
    if "hook" in case:
        model.register_comm_hook(None, allreduce_hook)
    if "compressing hook" in case:
        model.register_comm_hook(None, fp16_compress_hook)
    return train(model, case, data)


def naive(case: Case, data: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    return train(NaiveDistributedDataParallel(shared_norms(make_network(case), case)), case, data)


def one_process(case: Case, data: Sequence[tuple[Tensor, Tensor]]) -> Trained:
    return train(make_network(case), case, data)


def once(make: Callable[[Case, Sequence[tuple[Tensor, Tensor]]], Trained], case: Case, size: int, data: Any) -> Trained:
    """What ``make`` makes of what it knows of ``case``; all ranks ask in the same order."""
    wrappers_own = {"hook", "compressing hook", "join", "rebuild"}
    known = tuple(name for name in case if (BY_NAME[name].model or BY_NAME[name].way) and name not in wrappers_own)
    key = (make, known, size, len(data))
    if key not in _oracles:
        _oracles[key] = make(known, data)
    return _oracles[key]


def precision_of(case: Case) -> float:
    """The rounding of one step: that of the narrowest type of the model, or of what a feature brings."""
    narrowest = max(torch.finfo(torch.float32).eps, torch.finfo(model_arguments(case).get("dtype", torch.float32)).eps)
    return max([narrowest, *(BY_NAME[name].precision for name in case)])


def differences(mine: Trained, other: Trained) -> Iterator[tuple[str, float]]:
    """How far each parameter and gradient is off, relative to its largest element or 1; infinity if one is missing."""
    for name, parameter in mine.parameters.items():
        yield name, distance(parameter, other.parameters[name])
        gradient, expected = mine.gradients[name], other.gradients[name]
        if gradient is None or expected is None:
            yield f"the gradient of {name}", 0.0 if gradient is expected else math.inf
        else:
            yield f"the gradient of {name}", distance(gradient, expected)


def distance(mine: Tensor, other: Tensor) -> float:
    if not mine.numel() or torch.equal(mine, other):
        return 0.0
    exact = other.to(torch.complex128)
    worst = (mine.to(torch.complex128) - exact).abs().max() / max(1.0, exact.abs().max().item())
    return math.inf if worst.isnan() else worst.item()


def same_on_all_ranks(mine: Trained) -> bool:
    """Whether all ranks hold the same bits; then one of them speaks for all."""
    digest = hashlib.sha256()
    for value in [*mine.parameters.values(), *mine.gradients.values()]:
        digest.update(b"none" if value is None else value.resolve_conj().flatten().view(torch.uint8).numpy().tobytes())
    assert dist.group.WORLD is not None
    return len(set(all_gather_bytes(digest.digest(), torch.device("cpu"), dist.group.WORLD))) == 1


def worst_of(mine: Trained, other: Trained, bound: float, what: str) -> float:
    """The largest difference; raises AssertionError if one is beyond ``bound``."""
    name, worst = max(differences(mine, other), key=lambda difference: difference[1])
    assert worst <= bound, f"{what}: {name} is off by {worst:.3g}, more than {bound:.3g}"
    return worst


def check(rank: int, size: int, case: Case, steps: int, transport: str) -> tuple[float, float]:
    """Differences against (the naive class, one process), as parts of the bound.

    Raises:
        AssertionError: a parameter or gradient is beyond the bound.
    """
    data = batches(steps, ROWS * size)
    share = [(inputs[rank::size], targets[rank::size]) for inputs, targets in data]
    mine = ours(case, transport, rank, share)
    bound = precision_of(case) * 2 * math.sqrt(steps) * math.log2(size + 1)
    rounds_alike = size <= 2 and all(BY_NAME[name].precision == 0 or name == "autocast" for name in case)
    against_naive = worst_of(mine, once(naive, case, size, share), 0.0 if rounds_alike else bound, "the naive class")
    assert same_on_all_ranks(mine), "the ranks differ"
    if "batch norm" in case or rank > 0:  # each rank normalises by its own rows, and one process does not
        return against_naive / bound, 0.0
    return against_naive / bound, worst_of(mine, once(one_process, case, size, data), bound, "one process") / bound


def check_all(rank: int, size: int, cases: Sequence[tuple[Case, str]], steps: int) -> Outcome:
    """Check (case, transport) pairs, on every rank of a world; what is no failed comparison ends it."""
    outcome = Outcome()
    for case, transport in cases:
        outcome.cases += 1
        try:
            worst = check(rank, size, case, steps, transport)
        except AssertionError as error:
            outcome.failures.append(f"{size} ranks, {transport}, {case}: {error}")
        except Exception as error:
            raise AssertionError(f"{size} ranks, {transport}, {case}: {type(error).__name__}: {error}") from error
        else:
            outcome.worst = (max(outcome.worst[0], worst[0]), max(outcome.worst[1], worst[1]))
    return outcome
