"""Whether all ranks come to the same unit."""

from __future__ import annotations

import torch

from ..transport.byte_gather import all_gather_bytes
from .transports import Transport


def check_same_unit(transport: Transport, device: torch.device, name: str) -> None:
    """Compare the name of the unit that runs next; all ranks that stray from the agreed order call this together.

    Raises:
        RuntimeError: the ranks run different units, or not all came to compare.
    """
    if transport.group is None:
        return
    try:
        names = [said.decode() for said in all_gather_bytes(name.encode(), device, transport.group)]
    except RuntimeError as error:
        transport.give_up()
        raise RuntimeError(
            f"Rank {transport.rank} runs the unit {name} where it ran another one in the last iteration, and not all "
            f"other ranks did ({error}). Every rank must take the same path through sharded modules."
        ) from error
    if len(set(names)) > 1:
        transport.give_up()
        said = ", ".join(f"rank {rank} runs {other}" for rank, other in enumerate(names))
        raise RuntimeError(
            f"The ranks do not run the units of the model in the same order: {said}. "
            "Every rank must take the same path through sharded modules; make what differs a unit of none."
        )
