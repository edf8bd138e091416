"""Where the workers of a round meet: open before anybody is told of it, and nobody else's."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest

from dlaunch.agent.meeting import open_meeting
from dlaunch.environ import Meeting
from dlaunch.errors import ConfigurationError
from dlaunch.spec import JobSpec, Program, ProgramKind

PROGRAM = Program(ProgramKind.SCRIPT, "train.py", (), sys.executable)


def test_each_round_meets_at_a_port_of_its_own_that_takes_connections_at_once() -> None:
    spec = JobSpec(PROGRAM, master_port=0)
    opened = [open_meeting(spec, starter_serves=True, address="127.0.0.1") for _ in range(3)]
    assert len({each.port for each in opened}) == 3
    for each in opened:
        assert each.meeting == Meeting("127.0.0.1", each.port, served_by_agent=True)
        socket.create_connection((each.address, each.port)).close()
        each.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((each.address, each.port))


def test_the_nodes_own_address_comes_first_and_gets_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = JobSpec(PROGRAM, master_addr="127.0.0.1", master_port=taken.getsockname()[1])
        with contextlib.closing(open_meeting(spec, starter_serves=True, address="127.0.0.2")) as opened:
            assert opened.address == "127.0.0.2"
            assert opened.port != spec.master_port
            assert opened.listener is not None
            assert opened.listener.getsockname() == ("127.0.0.2", opened.port)


def test_without_an_address_of_its_own_the_place_is_the_one_that_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    spec = JobSpec(PROGRAM, master_addr="localhost", master_port=port)
    with contextlib.closing(open_meeting(spec, starter_serves=True)) as opened:
        assert opened.meeting == Meeting("localhost", port, served_by_agent=True)
        assert opened.listener is not None
        assert opened.listener.getsockname()[1] == port


@pytest.mark.parametrize("reason", ["the starter cannot", "torch may not"])
def test_where_nobody_can_serve_the_port_is_only_found(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "torch may not":
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    opened = open_meeting(JobSpec(PROGRAM), starter_serves=reason == "torch may not", address="127.0.0.1")
    assert (opened.served, opened.listener) == (False, None)
    socket.create_server(("127.0.0.1", opened.port)).close()  # rank 0 can bind it
    opened.close()


@pytest.mark.parametrize("address", ["192.0.2.1", "no such host.invalid"])
def test_an_address_that_is_not_ours_gets_a_sentence_with_the_fix(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{address}.*(cannot be resolved|cannot listen|port 0).*") as caught:
        open_meeting(JobSpec(PROGRAM), starter_serves=True, address=address)
    assert "--local-addr" in str(caught.value.fix)
