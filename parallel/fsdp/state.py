"""State dicts of a sharded model: whole ones that any module can load, and each rank's part.

Whole tensors are put together one at a time. A rank that streams them holds no more beside its rows than the present
one, and a copy of it where dimension 0 does not go round; tied ones until their last name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.shards import shard
from ..collective_error import told
from .fully_shard import run_of
from .sharded_parameter import ShardedParameter, shard_of
from .state_forms import StateForm, dtensor_like, shown_as


def listed(model: nn.Module) -> dict[str, Any]:
    """All names of the state dict; parameters as they are held, as this rank's rows."""
    run = run_of(model)
    run.settle()
    with shown_as(run, StateForm.ROWS):
        state: dict[str, Any] = model.state_dict(keep_vars=True)
    return state


def stream_full_state(model: nn.Module, *, rank0_only: bool = True) -> Iterator[tuple[str, Tensor | None]]:
    """Names and whole tensors in host memory, one after the other; all ranks must exhaust it together.

    Args:
        model: with sharded modules in it.
        rank0_only: other ranks than the first get ``None``.
    """
    first = run_of(model).units[-1].is_first
    state = listed(model)
    names_left = Counter(map(id, state.values()))
    tied: dict[int, Tensor | None] = {}  # those that have another name to come
    for name, value in state.items():
        whole = tied.pop(id(value)) if id(value) in tied else _whole(value, rank0_only, first)
        names_left[id(value)] -= 1
        if names_left[id(value)]:
            tied[id(value)] = whole
        yield name, whole
        del whole  # or it would live until the next one is put together


def full_state_dict(model: nn.Module, *, rank0_only: bool = True) -> dict[str, Tensor]:
    """The state dict that the model would have had unsharded, in host memory; all ranks call this together.

    Returns:
        Names as before sharding and whole tensors; empty on other ranks than the first if ``rank0_only``.
    """
    return {name: value for name, value in stream_full_state(model, rank0_only=rank0_only) if value is not None}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, from_rank0: bool = False, strict: bool = True
) -> None:
    """Take over whole tensors: each rank keeps its rows. Without ``from_rank0``, so does ``load_state_dict``.

    Args:
        model: with sharded modules in it.
        state: of a plain module, of torch's FSDP or of ours; on the first rank only if ``from_rank0``.
        from_rank0: send it from the first rank, one tensor at a time.
        strict: as in ``load_state_dict``.
    """
    if not from_rank0:
        model.load_state_dict(state, strict=strict)
        return
    with torch.no_grad():
        for name, value in listed(model).items():
            _receive(name, value, state)


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """This rank's part, for ``sharded=`` of ``dlaunch.checkpoint``: rows know where they belong."""
    return {name: _part(value) for name, value in listed(model).items()}


def dtensor_state_dict(model: nn.Module) -> dict[str, Any]:
    """The same with DTensors that share memory with the rows: for ``torch.distributed.checkpoint``, both ways.

    ``dcp.save`` writes them; ``dcp.load`` into them fills the model, whatever the world size was.
    """
    return {name: _dtensor(value) for name, value in listed(model).items()}


def whole_of(rows: Tensor, parameter: ShardedParameter, *, rank0_only: bool) -> Tensor | None:
    """Put together what all ranks hold of a parameter, or of something of its shape; all ranks call it together."""
    unit = parameter.unit()
    group = unit.transport.group if unit is not None else None
    layout = parameter.layout
    if rank0_only and unit is not None and group is None and not unit.is_first:
        return None
    if unit is None or group is None:
        return rows.detach().cpu().clone().view(layout.shape)
    padded = _padded(rows.detach().to(unit.device), layout.rows_per_rank)
    takes = not rank0_only or parameter.rank == 0
    whole = padded.new_empty((layout.world_size * layout.rows_per_rank, *layout.shape[1:])) if takes else None
    places = range(0, layout.world_size * layout.rows_per_rank, max(1, layout.rows_per_rank))
    pieces = [whole[place : place + layout.rows_per_rank] for place in places] if whole is not None else None
    if layout.rows_per_rank:
        with told(f"state of {parameter.name}", group):
            if rank0_only:
                dist.gather(padded, pieces, dst=dist.get_global_rank(group, 0), group=group)
            elif pieces is not None:
                dist.all_gather(pieces, padded, group=group)
    if whole is None or (rank0_only and not unit.is_first):
        return None
    rows_only = whole[: layout.total_rows]
    return (rows_only if len(whole) == len(rows_only) else rows_only.clone()).cpu().view(layout.shape)


def _padded(rows: Tensor, count: int) -> Tensor:
    """With as many rows as a full piece has."""
    if rows.shape[0] == count:
        return rows.contiguous()
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]].copy_(rows)
    return padded


def rows_of(whole: Tensor, parameter: ShardedParameter) -> Tensor:
    """This rank's rows of something of the parameter's shape."""
    begin, end = parameter.layout.rows(parameter.rank)
    return (whole if whole.dim() else whole.view(1))[begin:end]


def _whole(value: Any, rank0_only: bool, first: bool) -> Any:
    parameter = shard_of(value) if isinstance(value, Tensor) else None
    if parameter is not None:
        return whole_of(value, parameter, rank0_only=rank0_only)
    if rank0_only and not first:
        return None
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _receive(name: str, value: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(value, Tensor):
        return
    parameter = shard_of(value)
    unit = parameter.unit() if parameter is not None else None
    group = (unit.transport.group if unit is not None else None) or dist.group.WORLD
    shape = value.shape if parameter is None else parameter.layout.shape
    device = value.device if unit is None else unit.device
    whole = torch.empty(shape, dtype=value.dtype, device=device)
    if dist.get_rank(group) == 0:
        if name not in state:
            raise KeyError(f"the state dict has no {name}")
        whole.copy_(state[name])
    dist.broadcast(whole, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    value.copy_(whole if parameter is None else rows_of(whole, parameter))


def _part(value: Any) -> Any:
    parameter = shard_of(value) if isinstance(value, Tensor) else None
    if parameter is None:
        return value
    shape = parameter.layout.shape or (1,)
    return shard(value.detach(), parameter.layout.rows(parameter.rank)[0], shape)


def _dtensor(value: Any) -> Any:
    parameter = shard_of(value) if isinstance(value, Tensor) else None
    return value if parameter is None else dtensor_of(value.detach(), parameter)


def dtensor_of(rows: Tensor, parameter: ShardedParameter) -> Any:
    """Rows of a parameter, or of something of its shape, as a DTensor in the same memory; plain if nothing is cut."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  -- slow to import, seldom needed

    unit = parameter.unit()
    if unit is None or unit.group is None:
        return rows
    if unit.mesh is None:
        unit.mesh = DeviceMesh.from_group(unit.group, unit.device.type)
    return dtensor_like(rows, parameter.layout.shape, unit.mesh)
