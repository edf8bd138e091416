"""A sharded model in a world of another size, in place: parameters and optimizer stay the same objects.

In this order: the ranks tell each other who they are and what they hold; `newest_whole` chooses a step; unit after unit
lies in new memory and gets its rows of whole tensors that are put together one at a time; then come the optimizer's
numbers and, for ranks that join, what is not sharded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..transport.byte_gather import all_gather_bytes
from .fully_shard import Groups, run_of
from .generations import Generation, Holding, Whole, newest_whole
from .held_rows import HeldValues, Key, dtype_named, held_rows, held_values, restore_values
from .replicas import Replicas
from .run import Run
from .shard_layout import ShardLayout
from .sharded_parameter import ShardedParameter, shard_of
from .state import rows_of
from .transports import transport_for
from .unit import Unit

_CPU = torch.device("cpu")


def rebuild(
    model: nn.Module,
    process_group: dist.ProcessGroup | Groups | None,
    optimizer: Optimizer | None = None,
    *,
    replicas: Replicas | None = None,
    joining: bool = False,
    through: dist.ProcessGroup | None = None,
) -> int:
    """Spread rows and optimizer state over the ranks of another group; all of them call this together.

    Whole tensors are put together one at a time on each rank and cut anew. Gradients are dropped. Rows of different
    steps are never mixed: the newest step is taken of which all rows are there, and ranks that are ahead go back to it.
    The optimizer gets the numbers of that step as well, learning rates included. Buffers and parameters that are not
    sharded stay each rank's own; a rank that joins gets another rank's.

    Args:
        model: sharded over one group, or over one with copies in others (hybrid). On a rank that joins: the same model,
            sharded with ``process_group=(None, None)``, its values do not matter.
        process_group: the new ranks, or a pair as `fully_shard` takes it; ``None`` on a rank that leaves.
        optimizer: of the sharded parameters; made anew of ``model.parameters()`` by ranks that join.
        replicas: choose among their generations, in which the rows of a lost rank are with its neighbour; ranks that
            join pass theirs too. Without it, rows are taken as they are, and no rank may be missing, unless another
            has the same rows (hybrid).
        joining: this rank has no rows yet.
        through: a group of all old and new ranks, over which rows travel; ``process_group`` if no old rank leaves and
            it is no pair.

    Returns:
        The step that was taken: the number that ``refresh`` was given, or, without ``replicas``, how many steps the
        optimizer had made since the model was sharded.

    Raises:
        RuntimeError: there is no step of which all rows are there; nothing has been changed then.
        ValueError: a rank that leaves, or a pair of groups, and no ``through``.
    """
    run = run_of(model)
    run.abandon()
    path = through if through is not None or isinstance(process_group, tuple) else process_group
    if path is None:
        raise ValueError("rebuild needs through=, a group of all ranks, for a rank that leaves and for hybrid sharding")
    held = _held(run, optimizer, replicas, joining, path)
    chosen = newest_whole([_holdings(said) for said in _tell_all(_told(held), path)])
    contents = _Contents.of(held.get(chosen.step), path, chosen.speaker)
    source = _Source(held.get(chosen.step), chosen, contents.keys, path)
    for unit in run.units:
        _move(unit, process_group, optimizer, source)
    if optimizer is not None and process_group is not None and contents.values.groups:
        restore_values(run, optimizer, contents.values)
    if any(_tell_all(joining, path)):
        _share_the_rest(model, chosen.speaker, joining, path)
    run.steps = chosen.step
    if replicas is not None and process_group is not None:
        replicas.restart(optimizer)
    return chosen.step


# What there is


def _tell_all(mine: Any, path: dist.ProcessGroup) -> list[Any]:
    """What JSON can carry, from each rank of the path."""
    return [json.loads(text) for text in all_gather_bytes(json.dumps(mine).encode(), _device(path), path)]


def _held(
    run: Run, optimizer: Optimizer | None, replicas: Replicas | None, joining: bool, path: dist.ProcessGroup
) -> dict[int, Generation]:
    """By step. Who keeps replicas first hears which ranks live, and how far each had begun to send."""
    keeps = replicas if not joining else None
    begun = dict(_tell_all([keeps.rank, keeps.begun] if keeps is not None else [None, None], path))
    if joining:
        return {}
    if keeps is not None:
        its = begun.get(keeps.neighbour)
        return keeps.complete(neighbour_lives=its is not None, neighbour_sends=its is not None and its >= keeps.begun)
    transport = run.units[-1].transport
    rows = {transport.rank: held_rows(run, optimizer)}
    return {run.steps: Generation(run.steps, transport.world_size, rows, held_values(run, optimizer))}


def _told(held: Mapping[int, Generation]) -> dict[str, Any]:
    return {str(step): [generation.world_size, sorted(generation.rows)] for step, generation in held.items()}


def _holdings(said: Mapping[str, Sequence[Any]]) -> dict[int, Holding]:
    return {int(step): Holding(*holding) for step, holding in said.items()}


class _Contents:
    """What is the same for all ranks of a generation."""

    def __init__(self, keys: list[Key], values: HeldValues) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def of(cls, generation: Generation | None, path: dist.ProcessGroup, speaker: int) -> _Contents:
        """One rank tells the others."""
        mine: Any = None
        if generation is not None and dist.get_rank(path) == speaker:
            keys = next(iter(generation.rows.values()))
            mine = [[asdict(key) for key in keys], *generation.values]
        keys_said, states, groups = _tell_all(mine, path)[speaker]
        return cls([Key(**key) for key in keys_said], HeldValues(states, groups))


# How it moves


class _Source:
    """Whole tensors from the rows that the ranks hold between them."""

    def __init__(
        self, generation: Generation | None, world: Whole, keys: Sequence[Key], path: dist.ProcessGroup
    ) -> None:
        self._generation, self._world, self._path = generation, world, path
        self._rank = dist.get_rank(path)
        self._keys: dict[str, list[Key]] = {}
        for key in keys:
            self._keys.setdefault(key.parameter, []).append(key)

    def keys(self, parameter: str) -> list[Key]:
        """What there is of a parameter."""
        return self._keys.get(parameter, [])

    def whole(self, key: Key, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """One tensor on every rank of the path."""
        layout = ShardLayout(shape, self._world.world_size)
        whole = torch.empty((layout.total_rows, *shape[1:]), dtype=dtype_named(key.dtype), device=device)
        for old in range(self._world.world_size):
            begin, end = layout.rows(old)
            if begin == end or layout.row_numel == 0:
                continue
            piece = whole[begin:end]
            if self._world.owners[old] == self._rank:
                assert self._generation is not None
                piece.copy_(_typed(self._generation.rows[old][key], piece))
            dist.broadcast(piece, src=dist.get_global_rank(self._path, self._world.owners[old]), group=self._path)
        return whole.view(shape)


def _typed(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as they are, or from the bytes in which replicas keep them."""
    if rows.dtype is torch.uint8 and like.dtype is not torch.uint8:
        return rows.clone().view(like.dtype).view(like.shape)
    return rows.view(like.shape)


def _move(unit: Unit, group: dist.ProcessGroup | Groups | None, optimizer: Optimizer | None, source: _Source) -> None:
    """Old rows live on in the source until the new ones are filled."""
    if group is not None:
        shared, copies = group if isinstance(group, tuple) else (group, None)
        unit.use_transport(transport_for(shared, unit.device, unit.wish), shared, copies)
    for parameter in unit.parameters:
        if optimizer is not None:
            optimizer.state.pop(parameter.shard, None)  # of another cut, and perhaps of a later step
        for key in source.keys(parameter.name):
            whole = source.whole(key, parameter.layout.shape, unit.device)
            if group is not None:
                _take(parameter, key, rows_of(whole, parameter), optimizer)


def _take(parameter: ShardedParameter, key: Key, rows: Tensor, optimizer: Optimizer | None) -> None:
    with torch.no_grad():
        if not key.of:
            parameter.shard.copy_(rows)
        elif optimizer is not None:
            optimizer.state[parameter.shard][key.of] = rows.to(parameter.shard.device, copy=True)


def _share_the_rest(model: nn.Module, speaker: int, takes: bool, path: dist.ProcessGroup) -> None:
    """Send buffers and parameters that are not sharded; only ranks that join take them."""
    source, device = dist.get_global_rank(path, speaker), _device(path)
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._buffers, module._parameters)
        for table in tables:
            for name, held in table.items():
                if held is None or shard_of(held) is not None:
                    continue
                sent = torch.empty_like(held, device=device) if held.is_meta else held.detach().to(device, copy=True)
                dist.broadcast(sent, src=source, group=path)
                if takes and held.is_meta:
                    table[name] = nn.Parameter(sent, held.requires_grad) if isinstance(held, nn.Parameter) else sent
                elif takes:
                    held.detach().copy_(sent)


def _device(group: dist.ProcessGroup) -> torch.device:
    on_gpus = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else _CPU
