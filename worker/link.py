"""The starter's end of its socket to the agent. Neither direction waits for the agent, which may be stopped (SIGSTOP).

A starter that waited, for the rest of a request or for room for an answer, would let its node's deadline pass.
"""

from __future__ import annotations

import os
import socket
import struct

from dlaunch import frames

from .birth import Request

_HEADER = struct.Struct(">I")
_FD = struct.Struct("i")
_FDS_SPACE = socket.CMSG_SPACE(frames.MAX_FDS * _FD.size)


class AgentLink:
    """Frames both ways; what does not fit into the socket now is kept and sent by a later `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._unsent = bytearray()
        self._begun = bytearray()  # of a frame that has not arrived whole, with its header
        self._fds: list[int] = []  # that came with it

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._unsent)

    def tell(self, frame: frames.Frame) -> None:
        """Send one frame, behind all that was sent before."""
        self._unsent += frames.encode(frame)
        self.flush()

    def flush(self) -> None:
        """Send what the socket has room for. An agent that has gone is noticed where it is listened to."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> Request | None:
        """The next request, if it has arrived whole.

        Raises EOFError when the agent has gone, or sends what is not a frame.
        """
        try:
            while (missing := self._missing()) > 0:
                self._begun += self._some(missing)
        except BlockingIOError:
            return None
        except (OSError, frames.FrameError) as error:
            raise EOFError from error
        body, fds = bytes(self._begun[_HEADER.size :]), self._fds
        self._begun, self._fds = bytearray(), []
        try:
            return Request(frames.decode(body), fds)
        except frames.FrameError as error:
            for fd in fds:
                os.close(fd)
            raise EOFError from error

    def _missing(self) -> int:
        """How many bytes to ask for: never more than the frame has, because the next one's descriptors are its own."""
        if len(self._begun) < _HEADER.size:
            return _HEADER.size - len(self._begun)
        size: int = _HEADER.unpack_from(self._begun)[0]
        if size > frames.MAX_FRAME_BYTES:
            raise frames.FrameError(f"a frame of {size} bytes")
        return _HEADER.size + size - len(self._begun)

    def _some(self, most: int) -> bytes:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, ancillary, _flags, _address = self._socket.recvmsg(most, _FDS_SPACE, flags)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _FD.size
                self._fds += [fd for (fd,) in _FD.iter_unpack(content[:whole])]
        if not data:
            raise EOFError
        return data
