"""Collectives for user code: typed, uneven where that is natural, with the rank and the waiting time in every error.

Every rank of the group must call them, in the same order. In a world of one, with or without a process group, they
return at once. Objects travel as JSON: what came from another process is never unpickled.

Each begins with one small row of numbers from every rank, which says what it called and with what: ranks that called
different collectives, or gave tensors that do not go together, are named on every rank. (gloo itself would abort the
process, or hang.) After such an error the group is as good as before.

Each takes ``timeout_s``, how long this rank waits for the others; the process group's own time-out if ``None``.
After another error the group is in an unknown state: end the process, or make a new group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .collective_error import told
from .collective_opening import MAX_DIMENSIONS, Group, check_alike, device_of, opened, wait

Plain: TypeAlias = "bool | int | float | str | Sequence[Plain] | Mapping[str, Plain] | None"


def all_gather(tensor: Tensor, group: Group = None, timeout_s: float | None = None) -> list[Tensor]:
    """Every rank's tensor, in order of ranks, each in its own exact shape.

    Shapes may differ in every way, dtypes may not. The results do not carry gradients.

    Raises:
        TypeError: the ranks' dtypes differ, or it is no tensor of plain numbers in memory (sparse, quantized, meta).
        CollectiveError: see ``collective_error``.
    """
    _check_tensor("all_gather", tensor, sparse=False)
    if _is_alone(group):
        return [tensor.detach().clone()]
    mine = _bytes_of(tensor)
    with told("all_gather", group):
        openings = opened("all_gather", tensor.shape, tensor.dtype, group, timeout_s)
        check_alike(openings, "dtype")
        shapes = [opening.shape for opening in openings]
        sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
        rows = _gathered_bytes(mine, max(sizes), group, timeout_s)
    return [
        row[:size].clone().view(tensor.dtype).reshape(shape)
        for row, size, shape in zip(rows, sizes, shapes, strict=True)
    ]


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: Group = None, timeout_s: float | None = None
) -> Tensor:
    """The ranks' tensors combined, on every rank; the one that was given stays as it is.

    Raises:
        TypeError: the ranks' dtypes differ, or it has no values (meta).
        ValueError: the ranks' shapes or operations differ.
        CollectiveError: see ``collective_error``.
    """
    _check_tensor("all_reduce", tensor, sparse=True)
    result = tensor.detach().clone()
    if not _is_alone(group):
        with told("all_reduce", group):
            openings = opened("all_reduce", tensor.shape, tensor.dtype, group, timeout_s, argument=_number_of(op))
            for what in ("dtype", "shape", "argument"):
                check_alike(openings, what)
            wait(lambda: dist.all_reduce(result, op, group, async_op=True), timeout_s)
    return result


def all_gather_object(value: Plain, group: Group = None, timeout_s: float | None = None) -> list[Any]:
    """Every rank's value, in order of ranks.

    Values are what JSON holds: None, booleans, numbers (infinities and NaN too), strings, lists, and dictionaries
    with string keys. Tuples arrive as lists, on the sender's rank as well.

    Raises:
        TypeError: anything else, with its place in the value; on this rank only, before anything is sent.
        CollectiveError: see ``collective_error``.
    """
    return _exchanged("all_gather_object", value, group, timeout_s)


def broadcast_object(value: Plain, source: int = 0, group: Group = None, timeout_s: float | None = None) -> Any:
    """The value of the group's rank ``source``, on every rank; the others' are not looked at.

    Raises:
        TypeError: on the source, as for ``all_gather_object``.
        ValueError: no such rank, or the ranks named different ones.
        CollectiveError: see ``collective_error``.
    """
    alone = _is_alone(group)
    if not 0 <= source < _size(group):
        raise ValueError(f"there is no rank {source} in a group of {_size(group)}")
    if alone:
        return _as_value(_as_bytes(value))
    sends = dist.get_rank(group) == source
    origin = source if group is None else dist.get_global_rank(group, source)
    device = device_of(group)
    data = _as_bytes(value).to(device) if sends else None
    with told("broadcast_object", group):
        mine = torch.Size([0 if data is None else len(data)])
        openings = opened("broadcast_object", mine, torch.uint8, group, timeout_s, argument=source)
        check_alike(openings, "argument")
        data = torch.empty(openings[source].shape, dtype=torch.uint8, device=device) if data is None else data
        wait(lambda: dist.broadcast(data, origin, group, async_op=True), timeout_s)
    return _as_value(data)


def average(
    metrics: Mapping[str, float | Tensor], count: float = 1, group: Group = None, timeout_s: float | None = None
) -> dict[str, float]:
    """Each metric's mean over the ranks, weighted with how many samples it stands for on each.

    Computed in float64 in the order of ranks, so every rank has the same bits.

    Args:
        metrics: means over this rank's samples: numbers, or tensors of one element.
        count: this rank's samples; a rank with 0 contributes nothing, and its metrics may be empty.

    Raises:
        ValueError: a negative count, no samples at all, a tensor of several elements, or other names on another rank.
        CollectiveError: see ``collective_error``.
    """
    if not 0 <= count < math.inf:
        raise ValueError(f"count is {count}: give the number of samples that the metrics are means of")
    mine = {name: _number(value, name) for name, value in metrics.items()}
    return weighted_means(_exchanged("average", [count, mine], group, timeout_s))


def weighted_means(reports: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """The means of ``(count, means)`` reports, one a rank; raises ValueError as ``average`` does."""
    counted = [(rank, count, means) for rank, (count, means) in enumerate(reports) if count]
    if not counted:
        raise ValueError("no rank has any samples: there is nothing to average")
    first, _, expected = counted[0]
    for rank, _, means in counted:
        if means.keys() != expected.keys():
            raise ValueError(
                f"rank {first} averages {sorted(expected)} and rank {rank} {sorted(means)}: name the same metrics"
            )
    total = math.fsum(count for _, count, _ in counted)
    return {name: math.fsum(count * means[name] for _, count, means in counted) / total for name in expected}


def barrier(group: Group = None, timeout_s: float | None = None) -> None:
    """Wait until every rank of the group is here.

    Raises:
        CollectiveError: see ``collective_error``.
    """
    if _is_alone(group):
        return
    with told("barrier", group):
        opened("barrier", torch.Size([]), torch.uint8, group, timeout_s)


def _number_of(op: Any) -> int:
    is_plain = isinstance(op, dist.ReduceOp.RedOpType)  # else it has a factor of its own
    return int(op) if is_plain else -1


def _number(value: float | Tensor, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"metric {name!r} is a tensor of {value.numel()} elements: give its mean")
    return float(value)


def _check_tensor(collective: str, tensor: Tensor, *, sparse: bool) -> None:
    if tensor.is_meta or tensor.is_quantized or (tensor.layout is not torch.strided and not sparse):
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else tensor.layout
        raise TypeError(f"{collective} takes tensors of plain numbers in memory, and this one is {kind}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise ValueError(f"{collective} takes tensors of at most {MAX_DIMENSIONS} dimensions, not {tensor.dim()}")


def _is_alone(group: Group) -> bool:
    size = _size(group)
    if size < 1:
        raise ValueError("this process is not in the group: only the group's own ranks call collectives in it")
    return size == 1


def _size(group: Group) -> int:
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if there else 1


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()  # bits that stand for values
    flat = plain.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element counts as contiguous with any stride, and view() wants 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _gathered_bytes(mine: Tensor, longest: int, group: Group, timeout_s: float | None) -> list[Tensor]:
    """Each rank's bytes, followed by zeros up to ``longest``, on the device of ``mine``."""
    padded = torch.zeros(longest, dtype=torch.uint8, device=mine.device)
    padded[: len(mine)] = mine
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    if longest:
        wait(lambda: dist.all_gather(rows, padded, group, async_op=True), timeout_s)
    return rows


def _exchanged(collective: str, value: Plain, group: Group, timeout_s: float | None) -> list[Any]:
    """Every rank's plain value, under the name that the caller knows."""
    mine = _as_bytes(value)
    if _is_alone(group):
        return [_as_value(mine)]
    with told(collective, group):
        here = mine.to(device_of(group))
        openings = opened(collective, torch.Size([len(mine)]), torch.uint8, group, timeout_s)
        sizes = [opening.shape[0] for opening in openings]
        rows = _gathered_bytes(here, max(sizes), group, timeout_s)
    return [_as_value(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _as_bytes(value: Plain) -> Tensor:
    _check_plain(value, "value")
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _as_value(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: dictionaries are sent with string keys only")
            _check_plain(child, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            _check_plain(child, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(
            f"{where} is a {type(value).__name__}, and only plain data is sent between ranks (None, booleans, "
            "numbers, strings, lists, dictionaries): send tensors with all_gather, or make plain data of it"
        )
