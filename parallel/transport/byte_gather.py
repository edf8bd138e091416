"""Bytes of any length from every rank to every rank, without pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(mine: bytes, device: torch.device, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank of the group passed, in order of ranks.

    Args:
        mine: this rank's bytes; their length may differ between ranks.
        device: a device that the group's backend can use.
    """
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length.item()) for length in sizes]
    padded = bytearray(mine.ljust(max(1, *lengths), b"\0"))
    tensor = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(tensor) for _ in lengths]
    dist.all_gather(gathered, tensor, group=group)
    return [bytes(other.tolist())[:length] for other, length in zip(gathered, lengths, strict=True)]
