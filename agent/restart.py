"""Whether a failed worker group is started again, and when. Pure: the history and the time are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlaunch.outcome import Attempt
from dlaunch.restarts import ALIKE, SAME_MISTAKE, are_one_mistake, backoff, budget_spent, mark_of
from dlaunch.spec import RestartPolicy


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
    if policy.early_stop and are_one_mistake([mark_of(attempt.root_cause) for attempt in attempts[-ALIKE:]]):
        return GiveUp(SAME_MISTAKE)
    counted = [at for at in restarts if policy.window_s is None or now - at < policy.window_s]
    if len(counted) >= policy.max_restarts:
        return GiveUp(budget_spent(policy.max_restarts, policy.window_s))
    return Restart(backoff(policy.backoff_s, policy.backoff_max_s, len(counted)))
