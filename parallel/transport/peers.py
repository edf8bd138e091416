"""Whether the processes that we wait for still live."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence


class Peers:
    """The processes of a group's ranks, held by descriptors that cannot come to mean another process."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._ranks: dict[int, tuple[int, int]] = {}  # descriptor: (rank, pid)
        self._poll = select.poll()
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = (rank, pid)
                self._poll.register(descriptor, select.POLLIN)

    def first_dead(self) -> tuple[int, int] | None:
        """Rank and process id of one that has ended; returns at once."""
        ended = self._poll.poll(0)
        return self._ranks[ended[0][0]] if ended else None

    def close(self) -> None:
        """Let go of the descriptors."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks = {}

    def __del__(self) -> None:
        self.close()
