"""Whether a failed worker group is started again, and when. Pure: the history and the time are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlaunch.outcome import Attempt, Failure, FailureKind
from dlaunch.spec import RestartPolicy

EARLY_S = 10.0  # a failure within so many seconds of a worker's start is an early one
ALIKE = 3  # so many early failures alike, one after the other, are a mistake in the script


class Restart(NamedTuple):
    """Start again after a delay."""

    delay_s: float


class GiveUp(NamedTuple):
    """The run ends here, and why."""

    reason: str


def decide_restart(
    policy: RestartPolicy, attempts: Sequence[Attempt], restarts: Sequence[float], now: float
) -> Restart | GiveUp:
    """What follows the failure of the last of ``attempts``; ``restarts`` are the times of those made so far."""
    if policy.early_stop and _same_mistake(attempts):
        return GiveUp(
            f"the same failure at the same place ended {ALIKE} attempts in their first {EARLY_S:.0f} s: "
            "a mistake in the script, not a fault (--no-early-stop tries on)"
        )
    counted = [at for at in restarts if policy.window_s is None or now - at < policy.window_s]
    if len(counted) >= policy.max_restarts:
        return GiveUp(_spent(policy))
    return Restart(_backoff(policy, len(counted)))


def _spent(policy: RestartPolicy) -> str:
    if policy.max_restarts == 0:
        return "no restarts were allowed (--max-restarts 0)"
    within = f" within {policy.window_s:g} s" if policy.window_s is not None else ""
    used = "the one restart was" if policy.max_restarts == 1 else f"all {policy.max_restarts} restarts were"
    return f"{used} used{within} (--max-restarts {policy.max_restarts})"


def _backoff(policy: RestartPolicy, earlier: int) -> float:
    return min(policy.backoff_s * 2.0 ** min(earlier, 60), policy.backoff_max_s)


def _same_mistake(attempts: Sequence[Attempt]) -> bool:
    if len(attempts) < ALIKE:
        return False
    marks = {_mark(attempt.root_cause) for attempt in attempts[-ALIKE:]}
    return len(marks) == 1 and None not in marks


def _mark(failure: Failure | None) -> tuple[object, ...] | None:
    """What makes two early failures the same; None for one that may have come from outside."""
    if failure is None or failure.lifetime_s >= EARLY_S or failure.status is None:
        return None
    if failure.kind is FailureKind.EXCEPTION and failure.exception:
        frames = failure.exception.frames
        place = (frames[-1].file, frames[-1].line) if frames else None
        return (failure.exception.type, place)
    if failure.kind is FailureKind.EXIT:
        return (failure.status.code,)
    return None
