"""Which transport reduces the buckets: the user's wish, or the fastest one that all ranks can use."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from .base import TorchTransport, Transport, is_gloo_on_cpus
from .shared_memory import SharedMemoryTransport, can_share_memory

WISHES = ("auto", "torch", "shared_memory")


def choose_transport(wish: str, group: dist.ProcessGroup, devices: Collection[torch.device]) -> Transport:
    """Resolve ``wish`` for buckets on ``devices``; all ranks of the group call this with the same wish.

    Raises:
        ValueError: there is no such transport.
        RuntimeError: shared memory was asked for and the ranks cannot share it.
    """
    if wish not in WISHES:
        raise ValueError(f"transport is one of {', '.join(WISHES)}, not {wish!r}.")
    on_cpus = all(device.type == "cpu" for device in devices)
    alone = dist.get_world_size(group) == 1
    if wish == "torch" or (wish == "auto" and (alone or not on_cpus or not is_gloo_on_cpus(group))):
        return TorchTransport(group, on_cpus)
    if on_cpus and can_share_memory(group):
        return SharedMemoryTransport(group)
    if wish == "shared_memory":
        raise RuntimeError(
            "transport='shared_memory' needs parameters on CPUs and all ranks as processes of one user on one x86-64 "
            "Linux host that see each other under /proc. Use transport='auto', which takes it where it can."
        )
    return TorchTransport(group, on_cpus)
