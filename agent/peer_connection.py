"""One TCP connection to another agent: connecting, the handshake, then JSON messages; it never blocks.

Frames are as in dlaunch.frames, without descriptors. A connection that breaks the form in any way is dropped.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections import deque
from contextlib import suppress
from enum import Enum
from typing import Any, Protocol

from dlaunch import frames
from dlaunch.clock import now
from dlaunch.rendezvous.values import Peer

from .peer_handshake import Frame, HandshakeError

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_HANDSHAKE_BYTES = 4096  # of one frame from somebody who has proved nothing yet
MAX_QUEUED_BYTES = 2 * MAX_MESSAGE_BYTES  # what waits for a peer that does not read; more is lost
READ_BYTES = 64 * 1024  # the most that one connection gets read before it is the next one's turn

_NOT_NOW = {errno.EINPROGRESS, errno.EAGAIN, errno.EINTR}
_CLOSED = {errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}
_RECVERR = ((socket.IPPROTO_IP, 11), (socket.IPPROTO_IPV6, 25))  # IP_RECVERR, IPV6_RECVERR; source: linux/in.h, in6.h
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # seconds, and a count
UNACKNOWLEDGED_MS = 20_000  # as long as the keep-alive above takes to give up


class How(Enum):
    """How a connection ended, or an attempt to have one."""

    REFUSED = "refused"  # the host itself says that nobody listens there
    CLOSED = "closed"  # by the other side, in order or by a reset
    SILENT = "silent"  # no answer in time, or no way there: says nothing of the other side
    STRANGE = "strange"  # not of this run, or it broke the form
    DROPPED = "dropped"  # by us


class Handshake(Protocol):
    """Either side of the handshake; raises HandshakeError."""

    def hear(self, frame: Frame) -> tuple[str | None, Frame | None]:
        """The other side's node id once it is proven, and what to say next."""


class Owner(Protocol):
    """Who is told of what happens to a connection."""

    def opened(self, connection: Connection) -> None:
        """The other side has proved that it is of this run."""

    def heard(self, connection: Connection, message: dict[str, Any]) -> None:
        """A message came."""

    def ended(self, connection: Connection, how: How) -> None:
        """It is closed. Told once, whoever closed it."""


class Connection:
    """One connection, from its start to its end."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        owner: Owner,
        handshake: Handshake,
        peer: Peer | None = None,
    ) -> None:
        self.peer = peer  # whom we meant to reach; None: it came to us
        self.node_id: str | None = None  # who it is, once that is proven
        self.used_at = self.made_at = now()
        self._sock = sock
        self._selector = selector
        self._owner = owner
        self._handshake = handshake
        self._reaching = peer is not None  # TCP's own connecting is still under way
        self._received = bytearray()
        self._messages: deque[bytes] = deque()  # for after the handshake
        self._out = bytearray()
        self._waiting_bytes = 0
        self._ended = False
        self._mask = selectors.EVENT_WRITE if self._reaching else selectors.EVENT_READ
        selector.register(sock, self._mask, self._on_ready)

    @property
    def queued_bytes(self) -> int:
        """What still waits to be sent."""
        return len(self._out) + self._waiting_bytes

    def say(self, frame: Frame) -> None:
        """Send a frame of the handshake."""
        self._out += frames.encode(frame)
        self._flush()

    def send(self, frame: bytes) -> None:
        """Send a message, a whole frame; lost where too much waits already."""
        if self._ended or self.queued_bytes + len(frame) > MAX_QUEUED_BYTES:
            return
        self._waiting_bytes += len(frame)
        self._messages.append(frame)
        self.used_at = now()
        self._flush()

    def end(self, how: How) -> None:
        """Close, and tell the owner."""
        if not self._ended:
            self._ended = True
            self._selector.unregister(self._sock)
            self._sock.close()
            self._messages.clear()
            self._out.clear()
            self._owner.ended(self, how)

    def _on_ready(self, _fd: int) -> None:
        if not self._reaching or self._has_reached():
            self._read()
            self._flush()

    def _has_reached(self) -> bool:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.end(how_failed(self._sock, code))
            return False
        self._reaching = False
        settle(self._sock)
        return True

    def _read(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(How.CLOSED if error.errno in _CLOSED else How.SILENT)
            return
        if not data:
            self.end(How.CLOSED)
            return
        self.used_at = now()
        self._received += data
        try:
            while not self._ended and (frame := self._next_frame()) is not None:
                self._hear(frame)
        except (frames.FrameError, HandshakeError, RecursionError):  # JSON may be nested as deeply as somebody likes
            self.end(How.STRANGE)

    def _next_frame(self) -> Frame | None:
        return frames.take(self._received, MAX_HANDSHAKE_BYTES if self.node_id is None else MAX_MESSAGE_BYTES)

    def _hear(self, frame: Frame) -> None:
        if self.node_id is not None:
            if frame["kind"] != "message" or not isinstance(frame.get("message"), dict):
                raise frames.FrameError("not a message")
            self._owner.heard(self, frame["message"])
            return
        node_id, answer = self._handshake.hear(frame)
        if answer is not None:
            self._out += frames.encode(answer)  # leaves at the next flush, unless the owner ends it here
        if node_id is not None:
            self.node_id = node_id
            self._owner.opened(self)

    def _flush(self) -> None:
        if self._ended or self._reaching:
            return
        try:
            while self._fill_out():
                del self._out[: self._sock.send(self._out)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # What came in before must be read, and how it ended be heard: reading tells both.
            self._out.clear()
            self._messages.clear()
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if mask != self._mask:
            self._mask = mask
            self._selector.modify(self._sock, mask, self._on_ready)

    def _fill_out(self) -> bool:
        if not self._out and self.node_id is not None and self._messages:
            frame = self._messages.popleft()
            self._waiting_bytes -= len(frame)
            self._out += frame
        return bool(self._out)


def message_frame(message: dict[str, Any]) -> bytes:
    """A message as it travels. Raises ValueError where it is too long: that is a mistake of the caller."""
    frame = frames.encode({"kind": "message", "message": message})
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(frame)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return frame


def reach(address: str) -> tuple[socket.socket | None, How | None]:
    """Begin to connect, without waiting: a socket, or how it failed at once."""
    try:
        host, _, port = address.rpartition(":")
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV  # never a name: that could block for seconds
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=numeric)
        family, kind, protocol, _name, place = found[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except (OSError, ValueError, OverflowError):
        return None, How.SILENT
    _report_icmp(sock, 1)
    code = sock.connect_ex(place)
    if code == 0 or code in _NOT_NOW:
        return sock, None
    how = how_failed(sock, code)
    sock.close()
    return None, how


def how_failed(sock: socket.socket, code: int) -> How:
    """What an attempt to connect that ended with this error number says of the other side.

    A refusal counts only as the TCP reset of the host itself. Firewalls and routers refuse too, by ICMP: that comes as
    the same error number, but leaves a report in the socket's queue of errors (ip(7), IP_RECVERR).
    """
    if code in _CLOSED:
        return How.CLOSED
    if code != errno.ECONNREFUSED:
        return How.SILENT
    try:
        sock.recvmsg(1, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return How.REFUSED
    return How.SILENT


def settle(sock: socket.socket) -> None:
    """The options of a connection that stands: small messages leave at once, a dead host is noticed in the end."""
    _report_icmp(sock, 0)  # from here on it would end connections for errors that pass
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        for option, value in KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _report_icmp(sock: socket.socket, on: int) -> None:
    level, option = _RECVERR[sock.family == socket.AF_INET6]
    with suppress(OSError):
        sock.setsockopt(level, option, on)
