"""Outcomes to tell about, for the tests of the report and of the summary."""

from __future__ import annotations

from typing import Any

from dlaunch.outcome import Attempt, ExceptionInfo, ExitStatus, Failure, FailureKind, Outcome, RunState, TracebackFrame
from dlaunch.spec import Program, ProgramKind

PROGRAM = Program(ProgramKind.SCRIPT, "train.py", ("--api-key", "hunter2"), "/usr/bin/python3")

RAISED = ExceptionInfo(
    "ValueError",
    "bad batch\nshape (3, 4)",
    (
        TracebackFrame("<frozen runpy>", 198, "_run_module_as_main"),
        TracebackFrame("train.py", 12, "<module>", "main()"),
        TracebackFrame("/home/me/project/model.py", 40, "step", "loss = model(x)"),
        TracebackFrame(
            "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1773, "_call_impl", "return f()"
        ),
    ),
    "Traceback (most recent call last):\n  File train.py\nValueError: bad batch\nshape (3, 4)\n",
)

FAILURE = Failure(
    kind=FailureKind.EXCEPTION,
    attempt=2,
    rank=5,
    local_rank=1,
    node="node0",
    pid=4242,
    status=ExitStatus(code=1),
    at=1010.0,
    lifetime_s=8.25,
    exception=RAISED,
    finalized=True,
    last_output=("epoch 1", "step 7 loss 0.4", "Traceback (most recent call last):", "ValueError: bad batch"),
    log_file="/logs/id_1234/attempt_2/1/stderr.log",
)


def failed(failure: Failure = FAILURE, **changes: Any) -> Outcome:
    """A run that this failure ended."""
    attempts = (
        Attempt(0, 1000.0, 1001.0, failure._replace(attempt=0), 3),
        Attempt(1, 1001.0, 1002.0, None),
        Attempt(2, 1002.0, 1010.5, failure, 7),
    )
    outcome = Outcome(
        state=RunState.FAILED,
        exit_code=failure.exit_code,
        reason="all 2 restarts were used (--max-restarts 2)",
        attempts=attempts,
        world_size=8,
        restarts_used=2,
        max_restarts=2,
        run_id="id",
        node="node0",
        started_at=1000.0,
        ended_at=1010.5,
        run_dir="/logs/id_1234",
    )
    return outcome._replace(**changes)


def succeeded(restarts_used: int = 0) -> Outcome:
    """A run that ended well, after failures if restarts were used."""
    attempts = tuple(Attempt(number, 1000.0, 1001.0, FAILURE) for number in range(restarts_used))
    return failed(
        state=RunState.SUCCEEDED,
        exit_code=0,
        reason="every worker ended with 0",
        attempts=(*attempts, Attempt(restarts_used, 1001.0, 1002.0, None)),
        restarts_used=restarts_used,
    )


def interrupted(signal: int = 15) -> Outcome:
    """A run that a signal to dlaunch ended."""
    return failed(
        state=RunState.INTERRUPTED,
        exit_code=128 + signal,
        signal=signal,
        attempts=(Attempt(0, 1000.0, 1010.0, None),),
        restarts_used=0,
    )
