"""Cutting a batch into one piece for each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .containers import opened


def scatter(inputs: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """One copy of ``inputs`` for each device that gets a part of the batch, at most one for each.

    Tensors are cut along ``dim`` as ``Tensor.chunk`` does, so a batch smaller than the number of devices leaves some
    out. Containers are rebuilt around the pieces. Tensors without dimensions are copied to every device, and what
    is no tensor is shared by all. Gradients flow back into the tensors that were cut.

    Raises:
        ValueError: the tensors would be cut into different numbers of pieces (torch's would drop the surplus).
        TypeError: a ``PackedSequence``, whose batch does not lie along one dimension.
    """
    tensors = list(_tensors_in(inputs))
    return _split(inputs, devices[: _number_of_pieces(tensors, len(devices), dim)], len(devices), dim)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, PackedSequence):
        raise TypeError("a PackedSequence cannot be scattered: pass the padded batch, and pack it inside forward()")
    if isinstance(value, Tensor):
        yield value
    elif (container := opened(value)) is not None:
        for child in container.children:
            yield from _tensors_in(child)


def _number_of_pieces(tensors: Sequence[Tensor], devices: int, dim: int) -> int:
    cut = [tensor for tensor in tensors if tensor.dim()]
    for tensor in cut:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to be scattered along")
    sizes = sorted({tensor.size(dim) for tensor in cut if tensor.size(dim)})
    if cut and not sizes:
        return 1  # an empty batch is for one device
    counts = [-(-size // -(-size // devices)) for size in sizes]
    if len(set(counts)) > 1:
        raise ValueError(
            f"tensors of sizes {sizes} along dimension {dim} would be cut into {counts} pieces for {devices} devices: "
            "pass only tensors of the batch's size, and keep others in the module as buffers"
        )
    return counts[0] if counts else devices


def _split(value: Any, devices: Sequence[torch.device], chunks: int, dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        pieces = value.chunk(chunks, dim) if value.dim() and len(devices) > 1 else [value] * len(devices)
        return [_moved(piece, device) for piece, device in zip(pieces, devices, strict=False)]
    if (container := opened(value)) is None:
        return [value] * len(devices)
    parts = [_split(child, devices, chunks, dim) for child in container.children]
    return [container.rebuild([part[index] for part in parts]) for index in range(len(devices))]


def _moved(piece: Tensor, device: torch.device) -> Tensor:
    return piece.to(device, non_blocking=device.type != "cpu")  # towards the CPU nothing would wait for the data
