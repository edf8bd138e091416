"""Tensors of which each rank has a part, and how the whole is put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .error import CheckpointError

_MARK = "__dlaunch_shard__"


def shard(data: Tensor, start: int, shape: Sequence[int]) -> dict[str, Any]:
    """A leaf for ``sharded=``: rows ``start`` to ``start + len(data)`` of a tensor of ``shape``.

    Args:
        data: this rank's rows (dimension 0 is the sharded one); may have none.
        start: the first of them.
        shape: of the whole tensor.

    Raises:
        ValueError: the rows do not lie within the whole.
    """
    whole = torch.Size(shape)
    if data.shape[1:] != whole[1:] or not 0 <= start <= start + data.shape[0] <= whole[0]:
        raise ValueError(f"rows {start} to {start + data.shape[0]} of shape {data.shape} are not part of {whole}")
    return {_MARK: 1, "data": data, "start": start, "shape": whole}


def assemble(trees: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """One tree from those of all ranks: shards are joined, anything else is the first rank's that has it.

    Raises:
        CheckpointError: the shards of a tensor do not cover it exactly.
    """
    return _assemble(trees, "sharded")


def _assemble(trees: Sequence[Mapping[Any, Any]], place: str) -> dict[Any, Any]:
    whole: dict[Any, Any] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree[key] for tree in trees if key in tree]
        where = f"{place}[{key!r}]"
        if not isinstance(values[0], Mapping):
            whole[key] = values[0]
        elif _MARK in values[0]:
            whole[key] = _join(values, where)
        else:
            whole[key] = _assemble(values, where)
    return whole


def _join(shards: Sequence[Mapping[str, Any]], place: str) -> Tensor:
    parts = sorted((part for part in shards if part["data"].shape[0]), key=lambda part: int(part["start"]))
    shape = torch.Size(shards[0]["shape"])
    end = 0
    for part in parts:
        if part["start"] != end or part["shape"] != shape:
            break
        end += part["data"].shape[0]
    if end != shape[0]:
        raise CheckpointError(f"The shards of {place} do not add up to {tuple(shape)}: row {end} is missing or double.")
    return torch.cat([part["data"] for part in parts]) if parts else shards[0]["data"].reshape(shape)
