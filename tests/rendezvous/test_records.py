"""Values under our keys: what is written is read back, and what anybody else writes is refused by its key and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlaunch.outcome import ExceptionInfo, ExitStatus, Failure, FailureKind, RunState, TracebackFrame
from dlaunch.rendezvous.records import (
    MAX_LINES,
    MAX_TEXT,
    AssignRecord,
    Join,
    Kind,
    Malformed,
    NodeRecord,
    Phase,
    ReportRecord,
    RoundRecord,
    RunSettings,
    SpecRecord,
    read_assign,
    read_node,
    read_report,
    read_round,
    read_spec,
    write_assign,
    write_node,
    write_report,
    write_round,
    write_spec,
)
from dlaunch.rendezvous.store import MAX_REQUEST_BYTES
from dlaunch.rendezvous.values import Ending, Peer

REPORT_KEY = "/dlaunch/run/report/3/n1/failed"
READERS: dict[str, Callable[[bytes], Any]] = {
    "spec": lambda data: read_spec("/dlaunch/run/spec", data),
    "node": lambda data: read_node("/dlaunch/run/nodes/n1", data),
    "assign": lambda data: read_assign("/dlaunch/run/assign/x/n1", data),
    "report": lambda data: read_report(REPORT_KEY, data, 7),
    "round": lambda data: read_round("/dlaunch/run/round", data),
}

FAILURE = Failure(
    *(FailureKind.EXCEPTION, 2, 1, 1, "host-a", 77, ExitStatus(code=1), 12.5, 3.25, "detail"),
    exception=ExceptionInfo("ValueError", "nö", (TracebackFrame("train.py", 7, "main", "load()"),), "Traceback"),
    finalized=True,
    last_output=("one", "two"),
    log_file="/var/log/1",
)
PEER = Peer("n1", "[::1]:29400")
WRITTEN: dict[str, tuple[bytes, Any]] = {
    "spec": (write_spec(record := SpecRecord(RunSettings(1, 4, 3, 60.0, join=Join.SETTLE), "token", 4711)), record),
    "node": (write_node(node := NodeRecord("n1", "10.0.0.1:1", "host-a", "boot", 8, "trainer", 3)), node),
    "assign": (
        write_assign(
            assign := AssignRecord(
                *(
                    "n1",
                    "host-a",
                    "10.0.0.1:1",
                    1,
                    2,
                    8,
                    16,
                    8,
                    8,
                    16,
                    "10.0.0.2",
                    29500,
                    True,
                    PEER,
                    PEER,
                    (PEER, PEER),
                )
            )
        ),
        assign,
    ),
    "report": (
        write_report(report := ReportRecord(3, "n1", Kind.FAILED, 7, "10.0.0.1", 29500, True, FAILURE, "because")),
        report,
    ),
    "round": (
        write_round(
            round_ := RoundRecord(
                number=3,
                phase=Phase.CLOSED,
                reason="all is over",
                restarts=2,
                nonce="nonce",
                elders=("n1", "n2"),
                expected=2,
                delay_s=1.5,
                restart_ages_s=(1.0, 60.5),
                marks=("exit 3",),
                streak_host="host-a",
                streak=2,
                ending=Ending(RunState.FAILED, 3, "no more", 2, FAILURE),
            )
        ),
        round_,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_written_is_read_back(name: str) -> None:
    data, record = WRITTEN[name]
    assert READERS[name](data) == record


@pytest.mark.parametrize("status", [None, ExitStatus(code=0), ExitStatus(code=255), ExitStatus(signal=9)])
def test_each_kind_of_end_is_read_back(status: ExitStatus | None) -> None:
    for kind in FailureKind:
        told = FAILURE._replace(kind=kind, status=status, exception=None, rank=None, pid=None, log_file=None)
        assert READERS["report"](write_report(WRITTEN["report"][1]._replace(failure=told))).failure == told


# --- what somebody else wrote ----------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=60))
@settings(max_examples=30, deadline=None)
def test_any_bytes_are_malformed(name: str, data: bytes) -> None:
    with pytest.raises(Malformed):
        READERS[name](data)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every part of a JSON value stands."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, inner in items for deeper in _paths(inner, (*path, key)))]


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines are
def test_whatever_stands_in_a_field_it_is_taken_or_malformed(name: str, data: st.DataObject) -> None:
    document = json.loads(WRITTEN[name][0])
    path = data.draw(st.sampled_from(_paths(document)[1:]))
    *outer, last = path
    inner = document
    for key in outer:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[last] = data.draw(ANYTHING)
    else:
        del inner[last]
    try:
        READERS[name](json.dumps(document).encode())
    except Malformed as problem:
        assert "/dlaunch/run/" in str(problem)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("value", [b"", b"[" * 100_000, b"\xff", b"null", b"[]", b'{"number":1' + b"0" * 5000 + b"}"])
def test_what_is_no_object_is_malformed(name: str, value: bytes) -> None:
    with pytest.raises(Malformed, match="something else than"):
        READERS[name](value)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("spec", "token", ""),
        ("spec", "lease", 0),
        ("node", "local_world_size", 0),
        ("node", "local_world_size", True),
        ("node", "local_world_size", 1 << 40),
        ("node", "host", "\ud800"),
        ("node", "address", "a\nb"),
        ("node", "node_rank", -1),
        ("assign", "group_rank", 2),
        ("assign", "base_rank", 9),
        ("assign", "meeting_address", "a\0b"),
        ("assign", "meeting_port", 65536),
        ("assign", "first", ["n1"]),
        ("report", "meeting_port", "29500"),
        ("round", "number", 0),
        ("round", "number", (1 << 63) - 1),
        ("round", "phase", "paused"),
        ("round", "nonce", "\ud800"),
        ("round", "elders", ["x"] * 9),
        ("round", "delay_s", float("nan")),
        ("round", "delay_s", float("inf")),
        ("round", "marks", ["x"] * 1000),
        ("round", "ending", None),
    ],
)
def test_a_wrong_field_is_refused(name: str, field: str, value: Any) -> None:
    document = json.loads(WRITTEN[name][0])
    document[field] = value
    with pytest.raises(Malformed, match="/dlaunch/run/"):
        READERS[name](json.dumps(document).encode())


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_a_failure_with_endless_texts_is_cut_to_what_a_store_takes_and_a_reader_accepts() -> None:
    endless = "x" * 1_000_000
    told = FAILURE._replace(
        detail=endless,
        exception=ExceptionInfo("E" * 100_000, endless, FAILURE.exception.frames * 1000 if FAILURE.exception else ()),
        last_output=("short",) * 1000,
    )
    written = write_report(WRITTEN["report"][1]._replace(failure=told))
    assert len(written) < MAX_REQUEST_BYTES
    read = READERS["report"](written).failure
    assert len(read.detail) == MAX_TEXT
    assert len(read.last_output) == len(read.exception.frames) == MAX_LINES


def test_a_source_line_without_end_does_not_make_a_failure_unreadable() -> None:
    frame = TracebackFrame("train.py", 1, "f", "x" * (MAX_TEXT + 1))
    told = FAILURE._replace(exception=ExceptionInfo("E", "m", (frame,)))
    READERS["report"](write_report(WRITTEN["report"][1]._replace(failure=told)))
