"""JSON frames over a Unix stream socket, with file descriptors beside them.

A frame is four bytes of length (big endian) and that many bytes of JSON, one object with a string ``kind``. Open
file descriptors travel with the first byte (SCM_RIGHTS). The agent, the guard, the starter and the workers speak
nothing else with one another; no frame is ever unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FDS = 16
_HEADER = struct.Struct(">I")
_INT = struct.Struct("i")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * _INT.size)

Frame = dict[str, Any]


class FrameError(Exception):
    """The other end sent what is not a frame."""


def encode(frame: Frame) -> bytes:
    """The bytes of one frame."""
    body = json.dumps(frame, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame in ``body``; raises FrameError for anything but a JSON object with a string ``kind``."""
    try:
        frame = json.loads(body.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise FrameError(f"not JSON: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("kind"), str):
        raise FrameError("not an object with a string 'kind'")
    return frame


def send(sock: socket.socket, frame: Frame, fds: Sequence[int] = ()) -> None:
    """Send one frame, blocking until all of it is in the socket.

    Raises OSError (BrokenPipeError, ConnectionResetError) when the other end is gone.
    """
    data = memoryview(encode(frame))
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def tell(sock: socket.socket, frame: Frame) -> None:
    """Send one frame, unless the other end is gone: that is noticed where it is listened to."""
    with suppress(OSError):
        send(sock, frame)


def receive(sock: socket.socket) -> tuple[Frame, list[int]] | None:
    """Block for one frame and its descriptors; None when the other end has closed.

    The descriptors are close-on-exec and belong to the caller.
    """
    header, fds = receive_some(sock, _HEADER.size)
    try:
        if not header:
            return None
        header += _exactly(sock, _HEADER.size - len(header))
        return decode(_exactly(sock, _body_size(header, MAX_FRAME_BYTES))), fds
    except (FrameError, OSError):
        for fd in fds:
            os.close(fd)
        raise


def receive_if_any(sock: socket.socket) -> tuple[Frame, list[int]] | None:
    """As `receive`, but None too where the other end sent garbage, or died with something of ours unread (a reset)."""
    try:
        return receive(sock)
    except (OSError, FrameError):
        return None


def receive_some(sock: socket.socket, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """At most so many bytes of a frame, and the descriptors that came beside them; no bytes: the other end has closed.

    ``most`` must not reach into the next frame, whose descriptors are its own. The descriptors are close-on-exec and
    belong to the caller. Raises OSError; with MSG_DONTWAIT in ``flags`` BlockingIOError where nothing has arrived.
    """
    # Not socket.recv_fds: it drops its flags, and so would let the descriptors leak into every child.
    data, ancillary, _flags, _address = sock.recvmsg(most, _FDS_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _INT.size
            fds += [fd for (fd,) in _INT.iter_unpack(content[:whole])]
    return data, fds


def missing(received: bytes | bytearray, most: int = MAX_FRAME_BYTES) -> int:
    """How many bytes the first frame in ``received`` lacks, of its header first; none or fewer: it is there.

    Raises FrameError where its body has more than ``most`` bytes.
    """
    if len(received) < _HEADER.size:
        return _HEADER.size - len(received)
    return _HEADER.size + _body_size(received, most) - len(received)


def take(received: bytearray, most: int = MAX_FRAME_BYTES) -> Frame | None:
    """Cut the first frame off what was received; None while it is not whole.

    Raises FrameError where it is none, or its body has more than ``most`` bytes.
    """
    if missing(received, most) > 0:
        return None
    end = _HEADER.size + _body_size(received, most)
    body = bytes(received[_HEADER.size : end])
    del received[:end]
    return decode(body)


class FrameReader:
    """Cuts a byte stream into frames, for a reader that must not block."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes; raises FrameError on garbage."""
        self._pending += data
        while (frame := take(self._pending)) is not None:
            yield frame


def _body_size(received: bytes | bytearray, most: int) -> int:
    size: int = _HEADER.unpack_from(received)[0]
    if size > most:
        raise FrameError(f"a frame of {size} bytes exceeds {most}")
    return size


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = sock.recv(min(size, 1 << 20))
        if not chunk:
            raise FrameError("the other end closed in the middle of a frame")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
