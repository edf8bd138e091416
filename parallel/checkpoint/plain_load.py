"""torch.load for files that nobody vouches for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch

from .error import CheckpointError


def load_plainly(file: Path | IO[bytes], name: str) -> Any:
    """What ``torch.load(weights_only=True)`` reads, in host memory.

    Args:
        file: a path or an open file.
        name: what to call it in an error.

    Raises:
        CheckpointError: reading it would run code.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reasons = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
        raise CheckpointError(
            f"{name} was not read, since that could run code: {' '.join(reasons) or error}",
            "It was not written by dlaunch.checkpoint.",
        ) from None
