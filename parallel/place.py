"""Which rank this process is, before and after the process group exists."""

from __future__ import annotations

import os

import torch.distributed as dist


def place_of_this_process() -> tuple[int, int]:
    """(rank, world size): of the default process group, else of the launcher's variables, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
