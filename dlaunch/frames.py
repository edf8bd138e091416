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
    header, fds = _header_and_fds(sock)
    try:
        if not header:
            return None
        header += _exactly(sock, _HEADER.size - len(header))
        return decode(_exactly(sock, _body_size(header))), fds
    except (FrameError, OSError):
        for fd in fds:
            os.close(fd)
        raise


class FrameReader:
    """Cuts a byte stream into frames, for a reader that must not block."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes; raises FrameError on garbage."""
        self._pending += data
        while len(self._pending) >= _HEADER.size:
            end = _HEADER.size + _body_size(bytes(self._pending[: _HEADER.size]))
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_HEADER.size : end])
            del self._pending[:end]
            yield decode(body)


def _header_and_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    # Not socket.recv_fds: it drops its flags, and so would let the descriptors leak into every child.
    space = socket.CMSG_SPACE(MAX_FDS * _INT.size)
    header, ancillary, _flags, _address = sock.recvmsg(_HEADER.size, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % _INT.size
            fds += [fd for (fd,) in _INT.iter_unpack(data[:whole])]
    return header, fds


def _body_size(header: bytes) -> int:
    size: int = _HEADER.unpack(header)[0]
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
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
