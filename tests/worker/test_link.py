"""Frames between agent and starter when the agent stops in the middle of everything."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from dlaunch import frames
from dlaunch.worker.link import AgentLink

Pair = tuple[AgentLink, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A link, and the agent's end of it."""
    ours, agent = socket.socketpair()
    with ours, agent:
        yield AgentLink(ours), agent


def test_a_request_that_comes_byte_by_byte_is_given_out_when_it_is_whole(pair: Pair) -> None:
    link, agent = pair
    data = frames.encode({"kind": "spawn", "text": "ü" * 10})
    for byte in data[:-1]:
        agent.send(bytes([byte]))
        assert link.receive() is None
    agent.send(data[-1:])
    request = link.receive()
    assert request is not None
    assert request.frame == {"kind": "spawn", "text": "ü" * 10}
    assert link.receive() is None


def test_each_request_has_its_own_descriptors_even_if_it_was_cut_after_its_first_byte(pair: Pair) -> None:
    link, agent = pair
    read_end, write_end = os.pipe()
    data = frames.encode({"kind": "first"})
    socket.send_fds(agent, [data[:1]], [write_end])
    assert link.receive() is None
    agent.sendall(data[1:])
    frames.send(agent, {"kind": "second"})
    frames.send(agent, {"kind": "third"}, [write_end, read_end])
    requests = [link.receive() for _ in range(3)]
    assert [(r.frame["kind"], len(r.fds)) for r in requests if r] == [("first", 1), ("second", 0), ("third", 2)]
    for fd in [fd for r in requests if r for fd in r.fds]:
        assert not os.get_inheritable(fd)
        os.close(fd)
    os.close(write_end)
    assert os.read(read_end, 1) == b"", "all copies are closed"
    os.close(read_end)


@pytest.mark.parametrize("garbage", [b"", b"\0\0\0\5hello", b"\0\0\0\2[]", b"\xff\xff\xff\xff", b"\0\0\0\5h"])
def test_an_agent_that_has_gone_or_sends_garbage_ends_the_link(pair: Pair, garbage: bytes) -> None:
    link, agent = pair
    agent.sendall(garbage)
    agent.close()
    with pytest.raises(EOFError):
        link.receive()


def test_what_the_agent_has_no_room_for_waits_and_comes_in_order(pair: Pair) -> None:
    link, agent = pair
    count = 10_000
    for number in range(count):
        link.tell({"kind": "exited", "id": number})
    assert link.has_unsent
    reader = frames.FrameReader()
    heard: list[int] = []
    while len(heard) < count:
        heard += [frame["id"] for frame in reader.feed(agent.recv(1 << 16))]
        link.flush()
    assert heard == list(range(count))
    assert not link.has_unsent


def test_nothing_waits_for_an_agent_that_has_gone(pair: Pair) -> None:
    link, agent = pair
    agent.close()
    link.tell({"kind": "exited"})
    assert not link.has_unsent
