"""What decides whether a failed job is started again, on one node or on many: pure functions of its failures."""

from __future__ import annotations

from collections.abc import Sequence

from .outcome import Failure, FailureKind

EARLY_S = 10.0  # a failure within so many seconds of a worker's start is an early one
ALIKE = 3  # so many early failures alike, one after the other, are a mistake in the script
MOST_MARK = 200  # characters
SAME_MISTAKE = (
    f"the same failure at the same place ended {ALIKE} attempts in their first {EARLY_S:.0f} s: "
    "a mistake in the script, not a fault (--no-early-stop tries on)"
)


def mark_of(failure: Failure | None) -> str:
    """What makes two early failures the same; empty for one that may have come from outside."""
    if failure is None or failure.lifetime_s >= EARLY_S or failure.status is None:
        return ""
    if failure.kind is FailureKind.EXCEPTION and failure.exception:
        frames = failure.exception.frames
        place = f"@{frames[-1].file}:{frames[-1].line}" if frames else ""
        return f"{failure.exception.type}{place}"[-MOST_MARK:]
    return f"exit {failure.status.code}" if failure.kind is FailureKind.EXIT else ""


def are_one_mistake(marks: Sequence[str]) -> bool:
    """Whether the last failures, by their marks, were all early and alike."""
    last = marks[-ALIKE:]
    return len(last) == ALIKE and len(set(last)) == 1 and bool(last[0])


def budget_spent(max_restarts: int, window_s: float | None) -> str:
    """Why there is no further restart."""
    if max_restarts == 0:
        return "no restarts were allowed (--max-restarts 0)"
    within = f" within {window_s:g} s" if window_s is not None else ""
    used = "the one restart was" if max_restarts == 1 else f"all {max_restarts} restarts were"
    return f"{used} used{within} (--max-restarts {max_restarts})"


def backoff(first_s: float, longest_s: float, earlier: int) -> float:
    """The wait before a restart in seconds: doubling with those that were ``earlier``, up to the longest."""
    return min(first_s * 2.0 ** min(earlier, 60), longest_s)
