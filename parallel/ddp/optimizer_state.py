"""An optimizer's state from one rank to all others: how a rank that has just come goes on where a survivor is.

What is no tensor travels as JSON, so nothing from another process is unpickled; tensors travel as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..transport.base import Transport
from ..transport.byte_gather import all_gather_bytes
from .broadcast import broadcast_coalesced

_PLAIN = (bool, int, float, str, type(None))


def broadcast_optimizer_state(
    optimizer: Optimizer,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    transport: Transport | None = None,
) -> None:
    """Give every rank's optimizer the state and the settings of that of rank ``source``; all ranks call it together.

    Args:
        optimizer: of the same kind on all ranks, over the same parameters in the same groups.
        source: the rank in the group whose state is taken.
        group: the ranks.
        device: one that the group's backend can use.
        transport: the group's, so that waiting ends when a rank gives up.

    Raises:
        RuntimeError: the ranks' optimizers differ; on every rank.
        TypeError: the state holds something else than tensors, numbers, texts and containers of them; on ``source``.
    """
    tensors: list[Tensor] = []
    is_source = dist.get_rank(group) == source
    told = {"shape": _shape(optimizer), "state": _pack(_state_of(optimizer), tensors, "state") if is_source else None}
    everyone = [json.loads(text) for text in all_gather_bytes(json.dumps(told).encode(), device, group)]
    _check([rank["shape"] for rank in everyone], source)
    if not is_source:
        state = _unpack(everyone[source]["state"], tensors, device)
        _put(optimizer, state)
    broadcast_coalesced([tensor for tensor in tensors if tensor.device.type != "cpu"], source, group, transport)
    _broadcast_from_host(
        [tensor for tensor in tensors if tensor.device.type == "cpu"], source, group, device, transport
    )


def _broadcast_from_host(
    tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup, device: torch.device, transport: Transport | None
) -> None:
    """Counts of steps stay in host memory, which not every backend takes."""
    there = [tensor.to(device) for tensor in tensors]
    broadcast_coalesced(there, source, group, transport)
    for tensor, sent in zip(tensors, there, strict=True):
        if sent is not tensor:
            tensor.copy_(sent)


def _shape(optimizer: Optimizer) -> list[Any]:
    groups = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, groups]


def _check(shapes: Sequence[Any], source: int) -> None:
    for rank, shape in enumerate(shapes):
        if shape != shapes[source]:
            raise RuntimeError(
                f"The optimizer of rank {rank} is not like that of rank {source}: {_described(shape)} and "
                f"{_described(shapes[source])}. Make it of the same kind, of the same parameters in the same order."
            )


def _described(shape: Any) -> str:
    kind, groups = shape
    return f"{kind} with {', '.join(str(len(group)) for group in groups)} parameters in its groups"


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "groups": [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups],
        "states": [optimizer.state.get(parameter, {}) for parameter in parameters],
    }


def _put(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    for group, settings in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(settings)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for parameter, values in zip(parameters, state["states"], strict=True):
        if values:
            optimizer.state[parameter] = values


def _pack(value: Any, tensors: list[Tensor], where: str) -> Any:
    """``value`` as JSON can hold it; its tensors are appended to ``tensors`` in order."""
    if isinstance(value, _PLAIN):
        return {"plain": value}
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": [kind, list(value.shape), value.device.type == "cpu"]}
    if isinstance(value, list | tuple):
        items = [_pack(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}}
    raise TypeError(f"The optimizer's {where} is a {type(value).__name__}, which cannot be sent to another rank.")


def _unpack(packed: Mapping[str, Any], tensors: list[Tensor], device: torch.device) -> Any:
    """The tree of `_pack`, with memory for its tensors, which are appended to ``tensors`` in the same order."""
    ((kind, content),) = packed.items()
    if kind == "plain":
        return content
    if kind == "tensor":
        dtype, shape, in_host_memory = content
        place = torch.device("cpu") if in_host_memory else device
        tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=place))
        return tensors[-1]
    if kind == "dict":
        return {key: _unpack(item, tensors, device) for key, item in content.items()}
    items = [_unpack(item, tensors, device) for item in content]
    return tuple(items) if kind == "tuple" else items
