"""decide_restart as a table: history and time in, decision and reason out."""

from __future__ import annotations

import pytest

from dlaunch.agent.restart import GiveUp, Restart, decide_restart
from dlaunch.outcome import Attempt, ExceptionInfo, ExitStatus, Failure, FailureKind, TracebackFrame
from dlaunch.restarts import ALIKE, EARLY_S
from dlaunch.spec import RestartPolicy


def failure(
    kind: FailureKind = FailureKind.SIGNAL, *, code: int | None = None, line: int = 7, lifetime_s: float = 1.0
) -> Failure:
    status = ExitStatus(code=code) if code is not None else ExitStatus(signal=9)
    exception = None
    if kind is FailureKind.EXCEPTION:
        exception = ExceptionInfo("ValueError", "no", (TracebackFrame("train.py", line, "main"),))
    return Failure(kind, 0, 0, 0, "host", 4711, status, 10.0, lifetime_s, exception=exception)


def attempts(*failures: Failure) -> list[Attempt]:
    return [Attempt(n, float(n), n + 1.0, each) for n, each in enumerate(failures)]


def raised(line: int = 7, lifetime_s: float = 1.0) -> Failure:
    return failure(FailureKind.EXCEPTION, code=1, line=line, lifetime_s=lifetime_s)


def test_no_restart_without_a_budget() -> None:
    decision = decide_restart(RestartPolicy(), attempts(failure()), [], now=5.0)
    assert decision == GiveUp("no restarts were allowed (--max-restarts 0)")


def test_the_budget_is_for_the_whole_run_without_a_window() -> None:
    policy = RestartPolicy(max_restarts=2)
    assert decide_restart(policy, attempts(failure()), [1.0], now=1e6) == Restart(0.0)
    assert decide_restart(policy, attempts(failure()), [1.0, 2.0], now=1e6) == GiveUp(
        "all 2 restarts were used (--max-restarts 2)"
    )


def test_the_budget_refills_with_time_in_a_window() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=60)
    assert isinstance(decide_restart(policy, attempts(failure()), [10.0], now=69.9), GiveUp)
    assert decide_restart(policy, attempts(failure()), [10.0], now=70.0) == Restart(0.0)


@pytest.mark.parametrize(("earlier", "delay_s"), [(0, 2.0), (1, 4.0), (2, 8.0), (3, 10.0), (2000, 10.0)])
def test_the_backoff_doubles_up_to_its_maximum(earlier: int, delay_s: float) -> None:
    policy = RestartPolicy(max_restarts=5000, backoff_s=2, backoff_max_s=10)
    assert decide_restart(policy, attempts(failure()), [0.0] * earlier, now=1.0) == Restart(delay_s)


def test_the_same_mistake_each_time_ends_the_run_early() -> None:
    decision = decide_restart(RestartPolicy(max_restarts=100), attempts(*[raised()] * ALIKE), [1.0] * 2, now=9.0)
    assert isinstance(decision, GiveUp)
    assert "a mistake in the script" in decision.reason
    assert "--no-early-stop" in decision.reason


@pytest.mark.parametrize(
    "history",
    [
        [raised()] * (ALIKE - 1),
        [raised(7), raised(7), raised(8)],
        [raised(lifetime_s=EARLY_S)] * ALIKE,
        [failure(FailureKind.SIGNAL)] * ALIKE,
        [failure(FailureKind.EXIT, code=3), failure(FailureKind.EXIT, code=3), failure(FailureKind.EXIT, code=4)],
        [failure(FailureKind.INFRASTRUCTURE)] * ALIKE,
    ],
    ids=["too few", "another line", "not early", "signals come from outside", "another code", "ours"],
)
def test_what_may_be_a_fault_is_tried_again(history: list[Failure]) -> None:
    assert decide_restart(RestartPolicy(max_restarts=100), attempts(*history), [1.0] * 2, now=9.0) == Restart(0.0)


def test_early_stop_can_be_turned_off() -> None:
    policy = RestartPolicy(max_restarts=100, early_stop=False)
    assert decide_restart(policy, attempts(*[raised()] * 5), [1.0] * 4, now=9.0) == Restart(0.0)
