"""Whether all ranks come to the same units in the same order.

[Note: the order of units]
Ranks that come to units in different orders would wait for each other for ever, or take one unit's rows for another's.
So units are compared: all in the first iteration, later those from where this iteration's path leaves that of the last.
As long as all are on the path on which they agreed, nothing is sent. A rank that strays alone waits at the comparison,
without having begun an exchange, until the group's time-out. Ranks that share parameters are compared, and those that
hold the same rows (hybrid sharding, or none): they sum gradients.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..transport.byte_gather import all_gather_bytes
from .transports import Transport

if TYPE_CHECKING:
    from .unit import Unit


class CommonPath:
    """The numbers of the units of the last iteration, on which all ranks agreed, and of the present one."""

    def __init__(self) -> None:
        self._agreed: list[int] = []
        self._walked: list[int] = []
        self._strayed = False

    def come_to(self, unit: Unit) -> None:
        """The unit runs next.

        Raises:
            RuntimeError: on another rank another one does.
        """
        place = len(self._walked)
        self._walked.append(unit.number)
        if not self._strayed and place < len(self._agreed) and self._agreed[place] == unit.number:
            return
        self._strayed = True
        _compare(unit, unit.name)

    def end(self, root: Unit) -> None:
        """The iteration is over; whoever ends it early asks whether all do.

        Raises:
            RuntimeError: another rank goes on.
        """
        if not self._walked:
            return
        if not self._strayed and len(self._walked) < len(self._agreed) and sys.exc_info()[0] is None:
            _compare(root, "none any more")
        self._agreed = self._walked
        self.abandon()

    def abandon(self) -> None:
        """Forget the present iteration: it failed."""
        self._walked, self._strayed = [], False

    def forget(self) -> None:
        """Forget the agreed path as well: the ranks become others."""
        self._agreed = []
        self.abandon()


def _compare(unit: Unit, name: str) -> None:
    for group in (unit.transport.group, unit.replicas):
        if group is not None:
            _compare_within(group, unit.transport, unit.device, name)


def _compare_within(group: dist.ProcessGroup, transport: Transport, device: torch.device, name: str) -> None:
    try:
        names = [said.decode() for said in all_gather_bytes(name.encode(), device, group)]
    except RuntimeError as error:
        transport.give_up()
        raise RuntimeError(
            f"Rank {dist.get_rank()} runs the unit {name} where it ran another one in the last iteration, and not all "
            f"other ranks did ({error}). Every rank must take the same path through sharded modules."
        ) from error
    if len(set(names)) > 1:
        transport.give_up()
        ranks = dist.get_process_group_ranks(group)
        said = ", ".join(f"rank {rank} runs {other}" for rank, other in zip(ranks, names, strict=True))
        raise RuntimeError(
            f"The ranks do not run the units of the model in the same order: {said}. "
            "Every rank must take the same path through sharded modules; make what differs a unit of none."
        )
