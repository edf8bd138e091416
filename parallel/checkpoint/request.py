"""A checkpoint on demand: a signal to any worker, honoured by all at the next step boundary."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist

from dlaunch import clock

from ..agreement import largest
from ..collective_error import told


class CheckpointRequest:
    """Notes a signal, and tells all ranks at the same step.

    The launcher passes a SIGUSR1 that it gets on to the workers, once they have a handler: make this early. One rank
    that got it is enough.

    ``requested()`` is a collective of one number: call it on every rank, once a step, outside of the backward. It
    answers ``True`` on all ranks in the same step, once for each request.

    Handlers that were there before are called too. Make it in the main thread.

    Args:
        signals: those that ask for a checkpoint.
        process_group: the ranks of the job; the default group if ``None``.
        every: exchange the number only in every so many calls, where a step is very short.
        settle_s: a signal that comes so soon after an answer is part of that request. The launcher signals all workers
            of its node, a batch system all nodes, and they notice at different moments.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals] = (signal.SIGUSR1,),
        *,
        process_group: dist.ProcessGroup | None = None,
        every: int = 1,
        settle_s: float = 1.0,
    ) -> None:
        self._group = process_group
        self._every = every
        self._settle_s = settle_s
        self._calls = 0
        self._received = 0
        self._answered = 0
        self._answered_at: float | None = None
        self._before: dict[int, Any] = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._answered_at is None or clock.now() - self._answered_at > self._settle_s:
            self._received += 1
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def requested(self) -> bool:
        """Whether any rank was asked since the last time that this said so; the same answer on every rank.

        Raises:
            CollectiveError: another rank died, or did not come in time; see ``collective_error``.
        """
        self._calls += 1
        if self._calls % self._every:
            return False
        with told("CheckpointRequest.requested", self._group):
            asked = bool(largest([self._received > self._answered], self._group)[0])
        if asked:  # this answers signals that came during the exchange too: the checkpoint is yet to be taken
            self._answered_at = clock.now()
            self._answered = self._received
        return asked

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
