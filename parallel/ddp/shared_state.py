"""Parameters and buffers that all ranks share: whose they become, and how."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from ..collective_error import kind_of
from ..transport.byte_gather import all_gather_bytes
from .broadcast import broadcast_coalesced
from .buffers import shared_buffers
from .communication import Communication
from .same_model import verify_same_model


def agree_on_source(source: int | None, joining: bool, device: torch.device, group: dist.ProcessGroup) -> int:
    """The rank whose state all take: ``source``, or else the first that is not joining.

    Raises:
        RuntimeError: all ranks are joining.
    """
    told = all_gather_bytes(b"joining" if joining else b"", device, group)
    stayed = [rank for rank, word in enumerate(told) if not word]
    if not stayed:
        raise RuntimeError("All ranks of the new group are joining: none has a state to go on with.")
    return stayed[0] if source is None else source


def agree_on_state(
    module: nn.Module, ignored: Collection[str], source: int, group: dist.ProcessGroup, *, with_buffers: bool
) -> None:
    """Take parameters and, if asked, buffers of rank ``source``, but for those that are ``ignored``.

    Raises:
        RuntimeError: the ranks' models differ.
    """
    parameters = [item for item in module.named_parameters() if item[0] not in ignored]
    verify_same_model(parameters, group)
    buffers = shared_buffers(module, ignored) if with_buffers else {}
    broadcast_coalesced([*(parameter for _, parameter in parameters), *buffers.values()], source, group)


def take_buffers(module: nn.Module, ignored: Collection[str], source: int, communication: Communication) -> None:
    """Take the buffers of rank ``source``, but for those that are ``ignored``.

    Raises:
        CollectiveError: they cannot be had.
    """
    buffers = shared_buffers(module, ignored).values()
    try:
        broadcast_coalesced(buffers, source, communication.group, communication.choose_transport())
    except RuntimeError as error:
        communication.give_up()
        sentence = f"Rank {communication.rank} could not take the buffers of rank {source}: {error}"
        raise communication.error(kind_of(error), sentence, collective="broadcast") from error
