"""Ranks that give up tell those who wait for them, over backends that have no word for it.

[Note: giving up over gloo]
When a rank dies, gloo fails the collectives of those ranks that were exchanging bytes with it. A rank that waits for
one of *those* would wait until the group's time is up (half an hour by default), although nobody will ever answer. So
whoever fails leaves a mark in the group's store, and whoever has waited for a second begins to look for marks.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import _get_process_group_store, _world

from ..collective_error import PeerLost
from .counters import timeout_of

LOOK_EVERY_S = 1.0
_made_for: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class GiveUpMarks:
    """One mark for each rank of a group; all ranks make their marks of a group in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        number = _made_for[group] = _made_for.get(group, 0) + 1
        self._group = weakref.ref(group)  # the store is the group's alone: it must end with it
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._keys = [f"dlaunch/gave_up/{number}/{rank}" for rank in range(self._world_size)]
        self.timeout_s = timeout_of(group)

    def leave(self) -> None:
        """This rank will not take part any more."""
        if (store := self._store()) is not None:
            with contextlib.suppress(RuntimeError):  # a store that has gone can tell nobody
                store.set(self._keys[self._rank], "1")

    def check(self) -> None:
        """Raise if another rank has left its mark.

        Raises:
            PeerLost: one has.
        """
        for rank in range(self._world_size):
            if rank != self._rank and self._has_left(rank):
                sentence = f"rank {rank} gave up: its error says why"
                raise PeerLost(sentence, rank=self._rank, world_size=self._world_size)

    def _has_left(self, rank: int) -> bool:
        store = self._store()
        try:
            return store is not None and store.check([self._keys[rank]])
        except RuntimeError:  # the store has gone; gloo's own time-out remains
            return False

    def _store(self) -> Any:
        group = self._group()
        if group is None or group not in _world.pg_map:  # destroyed
            return None
        return _get_process_group_store(group)


class WatchedWork:
    """A collective of gloo under way."""

    def __init__(self, work: Work, marks: GiveUpMarks) -> None:
        self._work = work
        self._marks = marks

    def wait(self) -> None:
        """Return when the result is in place.

        Raises:
            PeerLost: another rank gave up.
            RuntimeError: gloo's own, for a connection that broke or a time that is up.
        """
        began = time.monotonic()
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_EVERY_S))
            except RuntimeError:
                if self._work.is_completed() or time.monotonic() - began > self._marks.timeout_s + LOOK_EVERY_S:
                    raise
                self._marks.check()
            else:
                return
