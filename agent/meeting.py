"""Where the workers of a round meet: an address and a port that nobody else can take in between."""

from __future__ import annotations

import socket

from dlaunch.errors import ConfigurationError

BACKLOG = 4096  # workers that connect before the store serves wait here


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
        raise ConfigurationError(f"--master-addr {address} cannot be resolved ({error.strerror}).") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"The workers' store cannot listen on {address} port {port} ({error.strerror}).",
            "Leave out --master-port to get a free one, or name an address of this host with --master-addr.",
        ) from None
    return listener


def free_port(address: str, port: int) -> int:
    """``port``, or for 0 one that was free a moment ago (rank 0 binds it itself: where torch is not ours to use)."""
    with open_listener(address, port) as listener:
        found: int = listener.getsockname()[1]
    return found
