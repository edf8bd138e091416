"""The agent's end of the guard: what it gives to hold stays open until nothing is left."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from dlaunch.agent.starter import Starter
from dlaunch.spec import JobSpec, Program, ProgramKind, StartMethod

PATIENCE_S = 60.0


def test_what_the_guard_was_given_to_hold_is_open_until_it_ends(tmp_path: Path) -> None:
    spec = JobSpec(Program(ProgramKind.SCRIPT, f"{tmp_path}/train.py", (), sys.executable))
    starter = Starter(spec, StartMethod.EXEC, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        starter.hold(listener.fileno())
        address = listener.getsockname()
    with socket.create_connection(address, PATIENCE_S) as waiting:
        starter.dismiss()
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, PATIENCE_S)


def test_a_guard_that_is_dead_is_given_nothing_and_that_is_no_error() -> None:
    starter = Starter(JobSpec(Program(ProgramKind.SCRIPT, "train.py", (), sys.executable)), StartMethod.EXEC, 1)
    starter.dismiss()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        starter.hold(listener.fileno())
