"""Many tensors from one rank to all others in few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..transport.base import Transport

CHUNK_BYTES = 250 * 1024 * 1024


def broadcast_coalesced(
    tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup, transport: Transport | None = None
) -> None:
    """Overwrite ``tensors`` with those of rank ``source`` of the group, whatever their types and shapes.

    Tensors travel as bytes, so one collective serves all data types of a device. Their version counters stay: autograd
    does not take the new values for a change by the user. With the
    group's ``transport``, waiting ends when a rank gives up.
    """
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            devices.setdefault(tensor.device, []).append(tensor.detach())
    for on_device in devices.values():
        # Wide elements first: then each piece of the flat buffer is aligned for its type.
        on_device.sort(key=lambda tensor: -tensor.element_size())
        for chunk in _chunks(on_device):
            _broadcast_as_one(chunk, dist.get_global_rank(group, source), group, transport)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    yield chunk


def _broadcast_as_one(
    tensors: list[Tensor], global_source: int, group: dist.ProcessGroup, transport: Transport | None
) -> None:
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    work = dist.broadcast(flat, src=global_source, group=group, async_op=True)
    (work if transport is None else transport.watch(work)).wait()
    if dist.get_rank() == global_source:
        return
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        for tensor, piece in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
