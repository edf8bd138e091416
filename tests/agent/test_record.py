"""The run's record: whole at every moment, and with the node's place where there are several nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlaunch.agent.record import RunRecord, start_ticks
from dlaunch.agent.writer import FileWriter
from dlaunch.environ import World
from dlaunch.outcome import Outcome, RunState
from dlaunch.spec import JobSpec, Program, ProgramKind

DEADLINE_S = 60
SPEC = JobSpec(Program(ProgramKind.SCRIPT, "train.py", (), sys.executable), run_id="exp7")
OUTCOME = Outcome(RunState.SUCCEEDED, 0, "all workers succeeded", (), 2, 1, 3, "exp7", "host", 0.0, 1.0)


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.parametrize("threaded", [False, True])
def test_the_record_of_a_node_alone_follows_its_run(tmp_path: Path, threaded: bool) -> None:
    path = tmp_path / "record.json"
    writer = FileWriter()
    record = RunRecord(path, SPEC, 2, "host", writer if threaded else None)
    record.starter_ready(11)
    record.attempt_started(1)
    for rank in range(2):
        record.worker_started(rank, 100 + rank)
    assert writer.wait(DEADLINE_S)
    document = read(path)
    assert document["schema"] == "dlaunch.record/1"
    assert document["agent"] == {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    assert (document["state"], document["attempt"], document["starter"]) == ("running", 1, 11)
    assert (document["world_size"], document["workers"]) == (2, {"0": 100, "1": 101})
    assert not {"node_id", "group_rank", "round"} & set(document)
    record.finished(OUTCOME)
    document = read(path)
    assert (document["state"], document["exit_code"], document["workers"]) == ("succeeded", 0, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_the_record_of_a_node_among_several_has_its_name_its_place_and_its_own_workers(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = RunRecord(path, SPEC, 2, "host")
    record.registered("node-a")
    assert read(path)["node_id"] == "node-a"
    record.attempt_started(4, World(1, 3, 2, 6, 2, 6), round_number=5)
    record.worker_started(2, 100)
    assert read(path)["workers"] == {}, "not before the node's group is whole"
    record.worker_started(3, 101)
    document = read(path)
    assert (document["group_rank"], document["round"], document["attempt"], document["world_size"]) == (1, 5, 4, 6)
    assert document["workers"] == {"2": 100, "3": 101}


def test_a_record_that_hangs_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    os.mkfifo(path.with_suffix(".new"))  # opening it to write waits for a reader
    writer = FileWriter()
    record = RunRecord(path, SPEC, 2, "host", writer)
    for attempt in range(1000):
        record.attempt_started(attempt)
    assert not writer.wait(0.05)
    with path.with_suffix(".new").open("rb"):
        assert writer.wait(DEADLINE_S)
    record.attempt_started(1000)
    assert writer.wait(DEADLINE_S)
    assert read(path)["attempt"] == 1000


def test_a_directory_that_cannot_be_written_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "gone" / "record.json", SPEC, 2, "host")
    record.attempt_started(0)
    record.finished(OUTCOME)
    assert not (tmp_path / "gone").exists()
