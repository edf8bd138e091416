"""A sharded model in a world of another size, in place: parameters and optimizer stay the same objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..transport.byte_gather import all_gather_bytes
from .fully_shard import Groups, run_of
from .held_rows import Key, dtype_named, held_rows, held_values, parameters_of, restored_value
from .replicas import Generation, Replicas
from .run import Run
from .shard_layout import ShardLayout
from .sharded_parameter import ShardedParameter
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
) -> int | None:
    """Spread rows and optimizer state over the ranks of another group; all of them call this together.

    Whole tensors are put together one at a time on each rank and cut anew. Gradients are dropped.

    Args:
        model: sharded over one group, or over one with copies in others (hybrid). On a rank that joins: the same model,
            sharded with ``process_group=(None, None)``, its values do not matter.
        process_group: the new ranks, or a pair as `fully_shard` takes it; ``None`` on a rank that leaves.
        optimizer: of the sharded parameters; made anew of ``model.parameters()`` by ranks that join.
        replicas: go back to their newest generation that is whole everywhere, and take the rows of lost ranks from
            their neighbours. Without it, rows are taken as they are, and no rank may be missing.
        joining: this rank has no rows yet.
        through: a group of all old and new ranks, over which rows travel; ``process_group`` if no old rank leaves and
            it is no pair.

    Returns:
        The step of the generation that was taken, or ``None``.

    Raises:
        RuntimeError: rows of some rank are nowhere.
        ValueError: a rank that leaves, or a pair of groups, and no ``through``.
    """
    run = run_of(model)
    run.abandon()
    path = through if through is not None or isinstance(process_group, tuple) else process_group
    if path is None:
        raise ValueError("rebuild needs through=, a group of all ranks, for a rank that leaves and for hybrid sharding")
    held = {} if joining else replicas.complete() if replicas is not None else {0: _present(run, optimizer)}
    world = _agree(held, path)
    source = _Source(held.get(world.step), world, path)
    for unit in run.units:
        _move(unit, process_group, optimizer, source)
    if optimizer is not None and process_group is not None:
        _restore_values(run, optimizer, world.values)
    if replicas is not None and process_group is not None:
        replicas.restart(optimizer)
    return world.step if replicas is not None else None


def _present(run: Run, optimizer: Optimizer | None) -> Generation:
    transport = run.units[-1].transport
    rows = held_rows(run, optimizer)
    return Generation(0, transport.world_size, {transport.rank: rows}, held_values(run, optimizer))


class _World:
    """What all ranks of the new group know after they have told each other what they hold."""

    def __init__(self, step: int, size: int, owners: dict[int, int], keys: list[Key], values: dict[str, Any]) -> None:
        self.step, self.size, self.owners, self.keys, self.values = step, size, owners, keys, values


def _agree(held: Mapping[int, Generation], path: dist.ProcessGroup) -> _World:
    told = {str(step): [generation.world_size, sorted(generation.rows)] for step, generation in sorted(held.items())}
    everyone = [json.loads(text) for text in all_gather_bytes(json.dumps(told).encode(), _device(path), path)]
    holders = {rank: steps for rank, steps in enumerate(everyone) if steps}
    common = set.intersection(*(set(steps) for steps in holders.values())) if holders else set()
    if not common:
        raise RuntimeError(
            "No state is whole on all ranks that remain: none was saved, or a rank was lost before the first refresh "
            "was complete. Load a checkpoint."
        )
    step = max(map(int, common))
    owners: dict[int, int] = {}
    for rank, steps in holders.items():
        for old in steps[str(step)][1]:
            owners.setdefault(old, rank)
    size = next(iter(holders.values()))[str(step)][0]
    missing = sorted(set(range(size)) - set(owners))
    if missing:
        raise RuntimeError(
            f"The rows of rank {', '.join(map(str, missing))} of the old world are lost: no rank has a copy. "
            "Keep Replicas(model, optimizer), whose copies outlive the loss of one rank, or load a checkpoint."
        )
    keys, values = _contents(held.get(step), path, min(holders))
    return _World(step, size, owners, keys, values)


def _contents(generation: Generation | None, path: dist.ProcessGroup, speaker: int) -> tuple[list[Key], dict[str, Any]]:
    mine = b""
    if generation is not None and dist.get_rank(path) == speaker:
        keys = next(iter(generation.rows.values()))
        mine = json.dumps([[asdict(key) for key in keys], generation.values]).encode()
    keys_said, values = json.loads(all_gather_bytes(mine, _device(path), path)[speaker])
    return [Key(**key) for key in keys_said], values


class _Source:
    """Whole tensors from the rows that the ranks hold between them."""

    def __init__(self, generation: Generation | None, world: _World, path: dist.ProcessGroup) -> None:
        self._generation, self._world, self._path = generation, world, path
        self._rank = dist.get_rank(path)
        self._keys: dict[str, list[Key]] = {}
        for key in world.keys:
            self._keys.setdefault(key.parameter, []).append(key)

    def keys(self, parameter: str) -> list[Key]:
        """What there is of a parameter."""
        return self._keys.get(parameter, [])

    def whole(self, key: Key, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """One tensor on every rank of the path."""
        layout = ShardLayout(shape, self._world.size)
        whole = torch.empty((layout.total_rows, *shape[1:]), dtype=dtype_named(key.dtype), device=device)
        for old in range(self._world.size):
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


def _restore_values(run: Run, optimizer: Optimizer, values: Mapping[str, Mapping[str, list[Any]]]) -> None:
    for name, parameter in parameters_of(run).items():
        for key, plain in values.get(name, {}).items():
            optimizer.state[parameter.shard][key] = restored_value(plain)


def _device(group: dist.ProcessGroup) -> torch.device:
    on_gpus = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else _CPU
