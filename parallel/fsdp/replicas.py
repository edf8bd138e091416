"""A copy of each rank's rows in its neighbour's host memory, so that the loss of any one rank loses nothing.

Gemini (Wang et al., SOSP 2023) keeps checkpoints in neighbours' memory; this is the smallest form of it. A refresh
copies this rank's rows, and those of the optimizer's state, and begins to send them to the next rank; the sending
happens beside training. The two newest generations are kept: one may be half sent when a rank is lost, and the other is
then whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .fully_shard import run_of
from .held_rows import Key, dtype_named, held_rows, held_values, parameters_of
from .run import Run
from .shard_layout import ShardLayout

_GENERATIONS = 2


@dataclass(frozen=True)
class Generation:
    """What was held at one step.

    Attributes:
        step: the number that ``refresh`` was given.
        world_size: of the world then.
        rows: by rank of that world, this rank's own and its neighbour's.
        values: the optimizer's numbers.
    """

    step: int
    world_size: int
    rows: dict[int, dict[Key, Tensor]]
    values: dict[str, dict[str, Any]]


class Replicas:
    """Keeps this rank's rows of the last refreshes and those of the rank before it.

    Args:
        model: sharded over one group; all its ranks make this together.
        optimizer: of the sharded parameters.
        every: ``after_step`` refreshes at each so manieth step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, every: int = 1) -> None:
        self._model, self._optimizer, self.every = model, optimizer, every
        self._generations: list[Generation] = []
        self._coming: tuple[Generation, list[dist.Work], Tensor] | None = None
        self._follow_group()

    def after_step(self, step: int) -> None:
        """Call it on every rank after the optimizer's step."""
        if step % self.every == 0:
            self.refresh(step)

    def refresh(self, step: int) -> None:
        """Copy this rank's rows and begin to send them on; all ranks call this together.

        Args:
            step: larger each time.
        """
        self.finish()
        run = self._run()
        rows = held_rows(run, self._optimizer)
        flat = _packed(list(rows.values()))
        own = _unpacked(flat, {key: tuple(tensor.shape) for key, tensor in rows.items()})
        shapes = self._shapes_of(run, list(rows), self._before)
        theirs = torch.empty(_nbytes(shapes), dtype=torch.uint8)
        held = {self._rank: own, self._before: _unpacked(theirs, shapes)} if self._world_size > 1 else {0: own}
        generation = Generation(step, self._world_size, held, held_values(run, self._optimizer))
        self._coming = (generation, self._send(flat, theirs), flat)

    def finish(self) -> None:
        """Return when the refresh under way is complete.

        Raises:
            RuntimeError: a neighbour has gone.
        """
        if self._coming is None:
            return
        generation, works, _ = self._coming
        self._coming = None
        for work in works:
            work.wait()
        self._generations = [*self._generations, generation][-_GENERATIONS:]

    def complete(self) -> dict[int, Generation]:
        """The generations that this rank holds whole, by step; what cannot be completed any more is dropped."""
        try:
            self.finish()
        except RuntimeError:
            self._coming = None  # the neighbour died while it sent: the generation before is whole
        return {generation.step: generation for generation in self._generations}

    def restart(self, optimizer: Optimizer | None) -> None:
        """Begin anew in the model's present group, after a rebuild."""
        self._generations, self._coming, self._optimizer = [], None, optimizer
        self._follow_group()

    def _follow_group(self) -> None:
        transport = self._run().units[-1].transport
        self._rank, self._world_size = transport.rank, transport.world_size
        self._before = (self._rank - 1) % self._world_size
        self._group: dist.ProcessGroup | None = None
        if transport.group is not None:
            # A group of its own: its messages never meet those of training.
            ranks = dist.get_process_group_ranks(transport.group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def _run(self) -> Run:
        return run_of(self._model)

    def _send(self, flat: Tensor, theirs: Tensor) -> list[dist.Work]:
        if self._group is None:
            return []
        after = dist.get_global_rank(self._group, (self._rank + 1) % self._world_size)
        before = dist.get_global_rank(self._group, self._before)
        works = [dist.irecv(theirs, before, group=self._group)] if theirs.numel() else []
        works += [dist.isend(flat, after, group=self._group)] if flat.numel() else []
        return [work for work in works if work is not None]

    def _shapes_of(self, run: Run, keys: list[Key], rank: int) -> dict[Key, tuple[int, ...]]:
        parameters = parameters_of(run)
        layouts: dict[str, ShardLayout] = {name: parameter.layout for name, parameter in parameters.items()}
        return {key: layouts[key.parameter].shard_shape(rank) for key in keys}


def _packed(tensors: list[Tensor]) -> Tensor:
    """One copy in host memory, as bytes."""
    pieces = [tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _nbytes(shapes: dict[Key, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() * dtype_named(key.dtype).itemsize for key, shape in shapes.items())


def _unpacked(flat: Tensor, shapes: dict[Key, tuple[int, ...]]) -> dict[Key, Tensor]:
    """The bytes of each tensor; whoever reads one copies it first, so alignment is no matter."""
    found: dict[Key, Tensor] = {}
    begin = 0
    for key, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype_named(key.dtype).itemsize
        found[key] = flat[begin : begin + nbytes]
        begin += nbytes
    return found
