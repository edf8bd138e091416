"""A worker's word is taken, its garbage is not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from dlaunch import frames
from dlaunch.agent.channel import WorkerChannel, exception_from_file
from dlaunch.outcome import TracebackFrame

EXCEPTION = {
    "kind": "exception",
    "at": 12.5,
    "type": "ValueError",
    "message": "no",
    "frames": [["train.py", 3, "main", "raise ValueError('no')"]],
    "traceback": "Traceback ...",
}


@pytest.fixture
def ends() -> tuple[WorkerChannel, socket.socket]:
    agent_end, worker_end = socket.socketpair()
    return WorkerChannel(agent_end), worker_end


def test_an_exception_is_taken_in_whole(ends: tuple[WorkerChannel, socket.socket]) -> None:
    channel, worker = ends
    frames.send(worker, EXCEPTION)
    assert channel.read()
    assert channel.exception is not None
    assert channel.exception.frames == (TracebackFrame("train.py", 3, "main", "raise ValueError('no')"),)
    assert channel.failed_at == 12.5


def test_the_moment_of_the_exception_stands_before_that_of_the_end(ends: tuple[WorkerChannel, socket.socket]) -> None:
    channel, worker = ends
    frames.send(worker, EXCEPTION)
    frames.send(worker, {"kind": "finalizing", "at": 13.0, "late_variables": ["OMP_NUM_THREADS"]})
    worker.close()
    assert not channel.read()
    assert (channel.failed_at, channel.finalized) == (12.5, True)
    assert channel.late_variables == ("OMP_NUM_THREADS",)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x04\x80abc",
        frames.encode({**EXCEPTION, "at": "noon"}),
        frames.encode({**EXCEPTION, "frames": [["too", "few"]]}),
        frames.encode({**EXCEPTION, "frames": 7}),
        frames.encode({"kind": "finalizing"}),
    ],
    ids=["huge", "not an object", "not JSON", "no time", "short frame", "no frames", "no moment"],
)
def test_garbage_closes_the_channel_and_harms_nobody(ends: tuple[WorkerChannel, socket.socket], garbage: bytes) -> None:
    channel, worker = ends
    worker.sendall(garbage)
    if channel.read():
        pytest.fail("the channel goes on after garbage")


def test_an_unknown_kind_is_passed_over(ends: tuple[WorkerChannel, socket.socket]) -> None:
    channel, worker = ends
    frames.send(worker, {"kind": "of a later version"})
    frames.send(worker, EXCEPTION)
    assert channel.read()
    assert channel.exception is not None


def test_the_error_file_of_torch_is_read(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    message = {"message": "ValueError: no: really", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"}}
    file.write_text(json.dumps({"message": message}))
    found = exception_from_file(file)
    assert found is not None
    assert (found.type, found.message, found.traceback) == ("ValueError", "no: really", "Traceback ...")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', '{"message": {"message": {}, "extraInfo": 3}}'])
def test_a_broken_error_file_is_no_error_of_ours(tmp_path: Path, text: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(text)
    assert exception_from_file(file) is None
    assert exception_from_file(tmp_path / "missing") is None
    assert exception_from_file(None) is None
