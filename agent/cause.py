"""Which of several failures was the first: the root cause of an attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlaunch.outcome import ExitStatus, Failure, FailureKind

from .events import WorkerExited


class WorkerEnd(NamedTuple):
    """One worker's life, as far as the blame is concerned."""

    local_rank: int
    rank: int
    pid: int | None
    started_at: float
    exited: WorkerExited | None  # None: it was not started, or nobody saw its end
    not_started: str = ""
    told_to_stop_at: float | None = None

    @property
    def status(self) -> ExitStatus | None:
        """How it ended, where somebody saw it."""
        return self.exited.status if self.exited else None

    @property
    def failed_at(self) -> float:
        """The moment of the failure: its interpreter's own word before the moment at which it was reaped."""
        if self.exited is None:
            return self.started_at
        said = self.exited.failed_at
        if said is None or (self.exited.status.signal is not None and self.exited.exception is None):
            return self.exited.at  # the signal is what failed it, even in the middle of its normal end
        return said

    @property
    def to_blame(self) -> bool:
        """Whether it failed of itself, rather than because it was told to stop."""
        if self.not_started:
            return True
        if self.exited is None or self.exited.status.ok:
            return False
        return self.told_to_stop_at is None or self.failed_at < self.told_to_stop_at


def root_cause(ends: Sequence[WorkerEnd], *, attempt: int, node: str) -> Failure | None:
    """The earliest failure among ``ends``, or None where nobody failed of itself."""
    blamed = [end for end in ends if end.to_blame]
    if not blamed:
        return None
    return _failure(min(blamed, key=lambda end: (end.failed_at, end.rank)), attempt, node)


def count_victims(ends: Sequence[WorkerEnd], cause: Failure) -> int:
    """How many other workers did not end well."""
    return sum(1 for end in ends if end.rank != cause.rank and not (end.status and end.status.ok))


def _failure(end: WorkerEnd, attempt: int, node: str) -> Failure:
    exited = end.exited
    return Failure(
        kind=_kind(end),
        attempt=attempt,
        rank=end.rank,
        local_rank=end.local_rank,
        node=node,
        pid=end.pid,
        status=end.status,
        at=end.failed_at,
        lifetime_s=max(0.0, end.failed_at - end.started_at),
        detail=end.not_started,
        exception=exited.exception if exited else None,
        finalized=exited.finalized if exited else False,
        last_output=exited.last_output if exited else (),
        log_file=exited.log_file if exited else None,
    )


def _kind(end: WorkerEnd) -> FailureKind:
    if end.exited is None:
        return FailureKind.NOT_STARTED
    if end.exited.oom_killed:
        return FailureKind.OOM_KILL
    if end.exited.status.signal is not None:
        return FailureKind.SIGNAL
    return FailureKind.EXCEPTION if end.exited.exception else FailureKind.EXIT
