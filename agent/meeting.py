"""Where the workers of a round meet: an address and a port that nobody else can take in between."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from dlaunch.environ import Meeting
from dlaunch.errors import ConfigurationError
from dlaunch.spec import JobSpec

BACKLOG = 4096  # workers that connect before the store serves wait here

_FIX = "Name an address of this host: with --master-addr, or in a job of several nodes with --local-addr."


class OpenedMeeting(NamedTuple):
    """A meeting point that this node has opened, and does not serve yet."""

    address: str
    port: int
    served: bool  # by a process of ours, once it has the listener; else rank 0 binds the port
    listener: socket.socket | None = None  # None unless served

    @property
    def meeting(self) -> Meeting:
        """What workers are told of it."""
        return Meeting(self.address, self.port, served_by_agent=self.served)

    def close(self) -> None:
        """Give up our end; a process that serves has its own by then."""
        if self.listener is not None:
            self.listener.close()


def open_meeting(spec: JobSpec, *, starter_serves: bool, address: str | None = None) -> OpenedMeeting:
    """A fresh meeting point for one round: on a free port of ``address``, this node's own, else where ``spec`` says.

    It takes connections from now on if it is to be served, which ``starter_serves`` says we can. Raises
    ConfigurationError where it cannot be opened.
    """
    host, port = (address, 0) if address is not None else (spec.master_addr, spec.master_port)
    shared = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    if not starter_serves or not shared:
        return OpenedMeeting(host, free_port(host, port), served=False)
    listener = open_listener(host, port)
    return OpenedMeeting(host, listener.getsockname()[1], served=True, listener=listener)


def open_listener(address: str, port: int) -> socket.socket:
    """A listening socket on ``address``; port 0 takes a free one.

    Raises ConfigurationError where the address is not ours or the port is taken.
    """
    try:
        family, kind, protocol, _name, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(
            f"{address}, where the workers are to meet, cannot be resolved ({error.strerror}).", _FIX
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"The workers' store cannot listen on {address} port {port} ({error.strerror}).",
            f"Leave out --master-port to get a free one. {_FIX}",
        ) from None
    return listener


def free_port(address: str, port: int) -> int:
    """``port``, or for 0 one that was free a moment ago (rank 0 binds it itself: where torch is not ours to use)."""
    with open_listener(address, port) as listener:
        found: int = listener.getsockname()[1]
    return found
