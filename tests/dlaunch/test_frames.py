"""Frames over a real socket: cut anywhere, with descriptors, and garbage refused."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlaunch import frames

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(JSON, min_size=1, max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_any_frames_survive_any_cutting(values: list[Any], sizes: list[int]) -> None:
    sent = [{"kind": "test", "value": value} for value in values]
    stream = b"".join(map(frames.encode, sent))
    reader, heard, position, turn = frames.FrameReader(), [], 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        heard += list(reader.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert heard == sent


def test_descriptors_travel_with_their_frame() -> None:
    left, right = socket.socketpair()
    read_end, write_end = os.pipe()
    frames.send(left, {"kind": "first"})
    frames.send(left, {"kind": "second"}, [write_end])
    os.close(write_end)
    first, second = frames.receive(right), frames.receive(right)
    assert first == ({"kind": "first"}, [])
    assert second is not None
    frame, (received,) = second
    assert frame == {"kind": "second"}
    assert not os.get_inheritable(received)
    os.write(received, b"through")
    assert os.read(read_end, 10) == b"through"
    left.close()
    assert frames.receive(right) is None


def test_a_frame_larger_than_the_sockets_buffer_arrives_whole() -> None:
    left, right = socket.socketpair()
    big = {"kind": "big", "text": "x" * 3_000_000}
    pid = os.fork()
    if pid == 0:
        frames.send(left, big)
        os._exit(0)
    left.close()
    assert frames.receive(right) == (big, [])
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x0a{"kind":1}',
        b"\x00\x00\x00\x01\xff",
    ],
    ids=["huge", "array", "no kind", "kind not text", "not UTF-8"],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(frames.FrameError):
        list(frames.FrameReader().feed(data))


def test_a_frame_is_cut_off_when_nothing_of_it_is_missing() -> None:
    first, second = frames.encode({"kind": "first"}), frames.encode({"kind": "second"})
    received = bytearray()
    for place, byte in enumerate(first):
        assert frames.missing(received) == (4 if place < 4 else len(first)) - place
        assert frames.take(received) is None
        received.append(byte)
    received += second
    assert frames.missing(received) == -len(second)
    assert frames.take(received) == {"kind": "first"}
    assert received == second
    assert frames.take(received) == {"kind": "second"}
    assert received == b""


def test_a_frame_that_is_longer_than_the_reader_allows_is_refused_by_its_header_alone() -> None:
    data = frames.encode({"kind": "test"})
    assert frames.take(bytearray(data), len(data) - 4) == {"kind": "test"}
    for refuse in (frames.missing, frames.take):
        with pytest.raises(frames.FrameError, match=f"exceeds {len(data) - 5}"):
            refuse(bytearray(data[:4]), len(data) - 5)


def ending(how: str) -> socket.socket:
    """A socket of which the other end sends a frame and then ends."""
    left, right = socket.socketpair()
    frames.send(left, {"kind": "last"})
    if how == "garbage":
        left.sendall(b"\xff\xff\xff\xff")
    elif how == "something unread":
        right.sendall(b"unread")
    left.close()
    return right


@pytest.mark.parametrize(("how", "error"), [("garbage", frames.FrameError), ("something unread", ConnectionResetError)])
def test_a_reader_that_takes_what_there_is_meets_no_error(how: str, error: type[Exception]) -> None:
    with ending(how) as sock:
        assert frames.receive_if_any(sock) == ({"kind": "last"}, [])
        assert frames.receive_if_any(sock) is None
    with ending(how) as sock, pytest.raises(error):
        while frames.receive(sock):
            pass


def test_an_end_in_the_middle_of_a_frame_is_an_error_not_an_end() -> None:
    left, right = socket.socketpair()
    left.sendall(b"\x00\x00\x00\x10half")
    left.close()
    with pytest.raises(frames.FrameError):
        frames.receive(right)
