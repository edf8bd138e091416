"""The starter's end of its socket to the agent. Neither direction waits for the agent, which may be stopped (SIGSTOP).

A starter that waited, for the rest of a request or for room for an answer, would let its node's deadline pass.
"""

from __future__ import annotations

import os
import socket

from dlaunch import frames

from .birth import Request


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
            while (missing := frames.missing(self._begun)) > 0:
                self._hear(missing)
        except BlockingIOError:
            return None
        except (OSError, frames.FrameError) as error:
            raise EOFError from error
        fds, self._fds = self._fds, []
        try:
            frame = frames.take(self._begun)
        except frames.FrameError as error:
            for fd in fds:
                os.close(fd)
            raise EOFError from error
        assert frame is not None, "nothing of it is missing"
        return Request(frame, fds)

    def _hear(self, most: int) -> None:
        data, fds = frames.receive_some(self._socket, most, socket.MSG_DONTWAIT)
        if not data:
            raise EOFError
        self._begun += data
        self._fds += fds
