"""Joining the world that the launcher's variables describe, on the device that belongs to this process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from dlaunch.errors import UsageError

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def device_of(accelerator: str | None, count: int, environment: Mapping[str, str]) -> torch.device:
    """The accelerator with this process's local rank; the CPU where there is none.

    Raises:
        UsageError: more processes on this machine than accelerators.
    """
    if accelerator is None or count == 0:
        return torch.device("cpu")
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no {accelerator} device: this machine has {count}.",
            f"Start --nproc-per-node {count}, or pass prepare(..., device='cpu').",
        )
    return torch.device(accelerator, local_rank)


def device_of_this_process() -> torch.device:
    """``device_of`` for this machine and environment."""
    for accelerator in ("cuda", "xpu"):
        backend = torch.get_device_module(accelerator)
        if backend.is_available():
            return device_of(accelerator, backend.device_count(), os.environ)
    return torch.device("cpu")


def join_process_group(device: torch.device, timeout_s: float | None = None) -> None:
    """Make ``device`` the current one and form the default process group; nothing where there is one already.

    The group is left at the interpreter's normal end.

    Args:
        device: decides the backend: gloo for the CPU, NCCL (gloo beside it for CPU tensors) for CUDA.
        timeout_s: of each collective; torch's default if ``None``.

    Raises:
        UsageError: the launcher's variables are not set.
    """
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    if dist.is_initialized():
        return
    if missing := [name for name in _NEEDED if name not in os.environ]:
        raise UsageError(f"{', '.join(missing)} is not set.", "Start the script with dlaunch run.")
    dist.init_process_group(
        _BACKENDS[device.type],
        timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        device_id=None if device.type == "cpu" else device,
    )
    atexit.register(_leave)


def _leave() -> None:
    """Only at a normal end: after an error a peer may be gone, and leaving in good order would wait for it."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
