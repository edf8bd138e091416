"""A copy of each rank's rows in its neighbour's host memory, so that the loss of any one rank loses nothing.

Gemini (Wang et al., SOSP 2023) keeps checkpoints in neighbours' memory; this is the smallest form of it. A refresh
copies this rank's rows, and those of the optimizer's state, and begins to send them to the next rank; the sending
happens beside training. The two newest generations are kept: one may be half sent when a rank is lost, and the other is
then whole.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..transport.counters import timeout_of
from .fully_shard import run_of
from .generations import Generation
from .held_rows import Key, dtype_named, held_rows, held_values, parameters_of
from .run import Run
from .shard_layout import ShardLayout

_GENERATIONS = 2
_WAIT_FOR_THE_LOST_S = 5.0  # what a lost rank sent is here, or its connection is known to be closed


class Refresh:
    """A generation under way: this rank's rows are there, its neighbour's are coming.

    Attributes:
        generation: with the neighbour's rows as soon as they have come.
    """

    def __init__(
        self,
        generation: Generation,
        before: int,
        arriving: dict[Key, Tensor],
        receiving: dist.Work | None,
        sending: dist.Work | None,
    ) -> None:
        self.generation = generation
        self._before, self._arriving = before, arriving
        self._receiving, self._sending = receiving, sending

    def receive(self, timeout_s: float | None = None) -> None:
        """Return when the neighbour's rows are there.

        Raises:
            RuntimeError: they will not come; whoever asks again gets none.
        """
        work, self._receiving = self._receiving, None
        arriving, self._arriving = self._arriving, {}
        if work is not None:
            if timeout_s is None:
                work.wait()
            else:
                work.wait(datetime.timedelta(seconds=timeout_s))
        if arriving:
            self.generation.rows[self._before] = arriving

    def send(self) -> None:
        """Return when this rank's rows are on their way.

        Raises:
            RuntimeError: the next rank does not take them.
        """
        work, self._sending = self._sending, None
        if work is not None:
            work.wait()

    def leave(self) -> None:
        """Wait for nothing."""
        self._receiving, self._arriving = None, {}


class Replicas:
    """Keeps this rank's rows of the last refreshes and those of the rank before it.

    Args:
        model: sharded over one group; all its ranks make this together.
        optimizer: of the sharded parameters.
        every: ``after_step`` refreshes at each so manieth step.

    Raises:
        ValueError: units of the model are cut over different groups.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, every: int = 1) -> None:
        self._model, self._optimizer, self.every = model, optimizer, every
        self._generations: list[Generation] = []
        self._coming: Refresh | None = None
        self._begun = -1
        self._follow_group()

    @property
    def rank(self) -> int:
        """This rank, of the world whose rows are kept."""
        return self._rank

    @property
    def begun(self) -> int:
        """The step of the last refresh that this rank began, in its present world; -1 before the first."""
        return self._begun

    @property
    def neighbour(self) -> int:
        """The rank whose rows this one keeps."""
        return self._before

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
        generation = Generation(step, self._world_size, {self._rank: own}, held_values(run, self._optimizer))
        shapes = self._shapes_of(run, list(rows), self._before) if self._group is not None else {}
        theirs = torch.empty(_nbytes(shapes), dtype=torch.uint8)
        receiving, sending = self._exchange(flat, theirs)
        self._begun = step
        self._coming = Refresh(generation, self._before, _unpacked(theirs, shapes), receiving, sending)

    def finish(self) -> None:
        """Return when the refresh under way is complete.

        Raises:
            RuntimeError: a neighbour has gone.
        """
        if self._coming is not None:
            self._coming.receive()
            self._coming.send()
            self._generations = [*self._generations, self._coming.generation][-_GENERATIONS:]
            self._coming = None

    def complete(self, *, neighbour_lives: bool = True, neighbour_sends: bool = True) -> dict[int, Generation]:
        """What this rank holds, by step; of a refresh that cannot be completed its own rows.

        Args:
            neighbour_lives: otherwise what it sent is here already, or never comes.
            neighbour_sends: it has begun this refresh, so it is worth waiting for.
        """
        generations = list(self._generations)
        if self._coming is not None:
            try:
                if neighbour_lives and not neighbour_sends:
                    self._coming.leave()
                self._coming.receive(None if neighbour_lives else _WAIT_FOR_THE_LOST_S)
            except RuntimeError:
                pass  # it died while it sent: whoever has its rows of the refresh before tells so
            generations.append(self._coming.generation)
        return {generation.step: generation for generation in generations}

    def restart(self, optimizer: Optimizer | None) -> None:
        """Begin anew in the model's present group, after a rebuild."""
        self._generations, self._coming, self._optimizer, self._begun = [], None, optimizer, -1
        self._follow_group()

    def _follow_group(self) -> None:
        transports = [unit.transport for unit in self._run().units]
        if len({None if transport.group is None else id(transport.group) for transport in transports}) > 1:
            raise ValueError(
                "Replicas keeps rows of one group of ranks, and the units of this model are cut over several: "
                "give fully_shard the same process_group for all of them"
            )
        transport = transports[-1]
        self._rank, self._world_size = transport.rank, transport.world_size
        self._before = (self._rank - 1) % self._world_size
        self._group: dist.ProcessGroup | None = None
        if transport.group is not None:
            # A group of its own: its messages never meet those of training.
            ranks = dist.get_process_group_ranks(transport.group)
            self._group = dist.new_group(
                ranks, timeout=_patience(transport.group), backend="gloo", use_local_synchronization=True
            )

    def _run(self) -> Run:
        return run_of(self._model)

    def _exchange(self, flat: Tensor, theirs: Tensor) -> tuple[dist.Work | None, dist.Work | None]:
        if self._group is None:
            return None, None
        after = dist.get_global_rank(self._group, (self._rank + 1) % self._world_size)
        before = dist.get_global_rank(self._group, self._before)
        receiving = dist.irecv(theirs, before, group=self._group) if theirs.numel() else None
        sending = dist.isend(flat, after, group=self._group) if flat.numel() else None
        return receiving, sending

    def _shapes_of(self, run: Run, keys: list[Key], rank: int) -> dict[Key, tuple[int, ...]]:
        parameters = parameters_of(run)
        layouts: dict[str, ShardLayout] = {name: parameter.layout for name, parameter in parameters.items()}
        return {key: layouts[key.parameter].shard_shape(rank) for key in keys}


def _patience(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """As long as training waits, if it is over gloo."""
    try:
        return datetime.timedelta(seconds=timeout_of(group))
    except RuntimeError:  # no backend for CPUs
        return None


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
