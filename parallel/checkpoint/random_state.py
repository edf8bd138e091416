"""The random number generators of a process, as part of a checkpoint."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RandomState:
    """State of Python's, torch's, numpy's (where it is loaded) and this process's CUDA generators.

    They belong to a rank, so save it under ``sharded=`` where there are several. ``load_state_dict`` sets the
    generators that the state knows and leaves the rest alone.
    """

    def state_dict(self) -> dict[str, Any]:
        """The present states, as plain values and tensors."""
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached)
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to ``state``."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "numpy" in state:
            import numpy  # noqa: PLC0415  -- only for who used it

            name, keys, position, has_gauss, cached = state["numpy"]
            numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
