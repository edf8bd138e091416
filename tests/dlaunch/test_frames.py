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


def test_an_end_in_the_middle_of_a_frame_is_an_error_not_an_end() -> None:
    left, right = socket.socketpair()
    left.sendall(b"\x00\x00\x00\x10half")
    left.close()
    with pytest.raises(frames.FrameError):
        frames.receive(right)
