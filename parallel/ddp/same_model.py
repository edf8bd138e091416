"""Do all ranks have the same parameters? Found out before training, and said with names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..transport.byte_gather import all_gather_bytes

Description = list[tuple[str, list[int], str]]  # name, shape, data type of each parameter


def describe(parameters: Sequence[tuple[str, Tensor]]) -> Description:
    """What must be alike on all ranks."""
    return [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in parameters]


def verify_same_model(parameters: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Compare names, shapes and types of the parameters over all ranks of the group.

    Raises:
        RuntimeError: they differ; the text names the first parameter that does, and the ranks.
    """
    device = parameters[0][1].device
    text = json.dumps(describe(parameters)).encode()
    if len(set(all_gather_bytes(hashlib.sha256(text).digest(), device, group))) > 1:
        texts = all_gather_bytes(text, device, group)
        raise RuntimeError(first_difference([json.loads(text) for text in texts]))


def first_difference(ranks: Sequence[Description]) -> str:
    """One sentence that names the first parameter that is not the same on all ranks.

    The wording that torch uses is part of it, for those who search for it.
    """
    for index, (name, shape, dtype) in enumerate(ranks[0]):
        others = [rank for rank, model in enumerate(ranks) if model[index : index + 1] != ranks[0][index : index + 1]]
        if others:
            there = ranks[others[0]][index : index + 1]
            what = f"{there[0][0]!r}, {there[0][2]}{there[0][1]}" if there else "no such parameter"
            return (
                "DDP expects same model across all ranks, but parameter "
                f"{index} is {name!r}, {dtype}{shape} on rank 0 and {what} on {_list_ranks(others)} "
                f"(params[{index}] appears not to match sizes of the same param in process 0). "
                "Build the model in the same way on every rank."
            )
    counts = ", ".join(f"rank {rank} has {len(model)} params" for rank, model in enumerate(ranks))
    extra = next(model[len(ranks[0])][0] for model in ranks if len(model) > len(ranks[0]))
    return f"DDP expects same model across all ranks, but {counts}; the first that rank 0 lacks is {extra!r}."


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
