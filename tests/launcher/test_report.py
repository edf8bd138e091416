"""What stands last on the terminal."""

from __future__ import annotations

import io
import re
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlaunch.launcher.report import MAX_LINES, format_report, render_report
from dlaunch.launcher.text import width
from dlaunch.outcome import ExceptionInfo, ExitStatus, Failure, FailureKind, Outcome, TracebackFrame
from dlaunch.spec import Program, ProgramKind
from tests.launcher import failures as runs


def told(outcome: Outcome, cells: int = 100, program: Program = runs.PROGRAM) -> list[str]:
    return [str(line) for line in format_report(outcome, program, cells)]


def test_an_exception_is_not_told_as_it_should_be() -> None:
    assert told(runs.failed()) == [
        "dlaunch: the job failed: rank 5 raised ValueError: bad batch",
        "  where     rank 5 (local rank 1) on node0, pid 4242, 8.2 s into attempt 2",
        "  message   shape (3, 4)",
        "  at        train.py:12 in <module>: main()",
        "            /home/me/project/model.py:40 in step: loss = model(x)",
        "  others    7 other workers were stopped because of it",
        "  attempts  3: all 2 restarts were used (--max-restarts 2)",
        "  output    epoch 1",
        "            step 7 loss 0.4",
        "  log       /logs/id_1234/attempt_2/1/stderr.log",
    ]


def test_a_kill_is_not_told_as_it_should_be() -> None:
    failure = runs.FAILURE._replace(
        kind=FailureKind.SIGNAL,
        status=ExitStatus(signal=signal.SIGSEGV),
        exception=None,
        last_output=("a", "b", "c", "d", "e"),
    )
    assert told(runs.failed(failure)) == [
        "dlaunch: the job failed: rank 5 was ended by signal 11 (SIGSEGV)",
        "  where     rank 5 (local rank 1) on node0, pid 4242, 8.2 s into attempt 2",
        "  others    7 other workers were stopped because of it",
        "  attempts  3: all 2 restarts were used (--max-restarts 2)",
        "  output    b",
        "            c",
        "            d",
        "            e",
        "  log       /logs/id_1234/attempt_2/1/stderr.log",
        "  hint      A crash in native code: set PYTHONFAULTHANDLER=1 to see where Python was.",
    ]


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"kind": FailureKind.EXIT, "status": ExitStatus(code=3)}, "rank 5 ended with exit code 3"),
        (
            {"kind": FailureKind.OOM_KILL, "status": ExitStatus(signal=9)},
            "rank 5 was killed by the kernel, which had run out of memory",
        ),
        (
            {"kind": FailureKind.NOT_STARTED, "status": None, "pid": None, "detail": "no such file"},
            "rank 5 could not be started: no such file",
        ),
        (
            {
                "kind": FailureKind.INFRASTRUCTURE,
                "rank": None,
                "status": ExitStatus(signal=9),
                "detail": "the starter died",
            },
            "the starter died",
        ),
        (
            {"kind": FailureKind.INFRASTRUCTURE, "rank": None, "status": ExitStatus(signal=9)},
            "a process of dlaunch was ended by signal 9 (SIGKILL)",
        ),
    ],
)
def test_a_kind_of_failure_is_told_otherwise(changes: dict[str, Any], headline: str) -> None:
    failure = runs.FAILURE._replace(exception=None, **changes)
    assert told(runs.failed(failure))[0] == f"dlaunch: the job failed: {headline}"


def test_a_clean_success_is_told() -> None:
    assert told(runs.succeeded()) == []


def test_restarts_of_a_success_are_not_told_in_one_line() -> None:
    assert told(runs.succeeded(restarts_used=1), 200) == [
        "dlaunch: succeeded after 1 of 2 restarts; the last one because rank 5 raised ValueError: bad batch."
    ]


def test_an_interruption_is_not_told_in_one_line() -> None:
    assert told(runs.interrupted()) == ["dlaunch: interrupted by SIGTERM after 10.5 s; 8 workers were stopped."]


def test_a_failure_without_attempts_is_not_told() -> None:
    assert told(runs.failed(attempts=(), reason="the starter was refused")) == [
        "dlaunch: the job failed: the starter was refused"
    ]


def test_frames_of_libraries_are_hidden_although_there_are_no_others() -> None:
    library = TracebackFrame("/venv/lib/python3.11/site-packages/torch/serialization.py", 1, "load", "x")
    exception = ExceptionInfo("EOFError", "", (library,))
    lines = told(runs.failed(runs.FAILURE._replace(exception=exception)))
    assert "  at        /venv/lib/python3.11/site-packages/torch/serialization.py:1 in load: x" in lines
    assert lines[0] == "dlaunch: the job failed: rank 5 raised EOFError"


def test_only_the_last_state_of_a_progress_bar_is_not_shown() -> None:
    failure = runs.FAILURE._replace(exception=None, last_output=(" 10%|#   |\r 20%|##  |\r 30%|### |\r",))
    assert "  output     30%|### |" in told(runs.failed(failure))


def test_a_path_of_the_log_is_cut() -> None:
    path = "/logs/" + "x" * 300 + "/stderr.log"
    assert f"  log       {path}" in told(runs.failed(runs.FAILURE._replace(log_file=path)), 80)


def test_the_hint_of_a_program_speaks_of_python() -> None:
    failure = runs.FAILURE._replace(kind=FailureKind.EXIT, exception=None, finalized=False, status=ExitStatus(code=3))
    lines = told(runs.failed(failure), 200, Program(ProgramKind.EXECUTABLE, "tool"))
    assert lines[-1] == "  hint      The program ended by itself with this exit code: its last lines may say why."


NASTY = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.sampled_from("\x1b\r\n\t\x07\x9b\u202e\u200b\u4e2d\u0301\udcff[]0;m\\"),
        st.sampled_from("ab /:"),
    ),
    max_size=400,
)
FRAMES = st.builds(TracebackFrame, NASTY, st.integers(0, 10**6), NASTY, NASTY)
FAILURES = st.builds(
    Failure,
    kind=st.sampled_from(FailureKind),
    attempt=st.integers(0, 1000),
    rank=st.none() | st.integers(0, 10**6),
    local_rank=st.none() | st.integers(0, 1000),
    node=NASTY,
    pid=st.none() | st.integers(1, 2**22),
    status=st.none()
    | st.builds(ExitStatus, code=st.integers(1, 255))
    | st.builds(ExitStatus, signal=st.integers(1, 64)),
    at=st.floats(0, 1e9),
    lifetime_s=st.floats(0, 1e9),
    detail=NASTY,
    exception=st.none()
    | st.builds(
        ExceptionInfo, type=NASTY, message=NASTY, frames=st.lists(FRAMES, max_size=12).map(tuple), traceback=NASTY
    ),
    finalized=st.booleans(),
    last_output=st.lists(NASTY, max_size=12).map(tuple),
    log_file=st.none() | NASTY,
)


@settings(max_examples=300, deadline=None)
@given(failure=FAILURES, cells=st.integers(1, 300), kind=st.sampled_from(ProgramKind), reason=NASTY)
def test_what_workers_print_breaks_the_report(failure: Failure, cells: int, kind: ProgramKind, reason: str) -> None:
    lines = format_report(runs.failed(failure, reason=reason), Program(kind, "train.py", interpreter="python"), cells)
    assert 1 <= len(lines) <= MAX_LINES
    for line in lines:
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in str(line))
        assert "\u202e" not in str(line)
        str(line).encode()  # no half of a surrogate pair
        assert width(str(line)) <= max(cells, 40) or line.label.strip() == "log"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_shown_where_they_are_not_wanted() -> None:
    outcome, terminal = runs.failed(), FakeTerminal()
    plain = "".join(f"{line}\n" for line in format_report(outcome, runs.PROGRAM, 200))
    assert render_report(outcome, runs.PROGRAM, io.StringIO(), {"TERM": "xterm"}) == plain
    assert render_report(outcome, runs.PROGRAM, terminal, {"TERM": "xterm", "NO_COLOR": "1"}) == plain
    assert render_report(outcome, runs.PROGRAM, terminal, {"TERM": "dumb"}) == plain
    assert render_report(outcome, runs.PROGRAM, None, {}) == plain


def test_colours_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    outcome = runs.failed()
    plain = "".join(f"{line}\n" for line in format_report(outcome, runs.PROGRAM, 200))
    coloured = render_report(outcome, runs.PROGRAM, FakeTerminal(), {"TERM": "xterm"})
    assert "\x1b[1;31mdlaunch: the job failed" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
