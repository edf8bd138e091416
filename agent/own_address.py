"""Which addresses are this host's own, found out by binding to them."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple


class Place(NamedTuple):
    """A numeric address."""

    family: socket.AddressFamily
    address: str
    scope: int = 0  # the network interface of a link-local IPv6 address

    def with_port(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        """What a socket of this family is bound or connected to."""
        return (self.address, port, 0, self.scope) if self.family is socket.AF_INET6 else (self.address, port)

    @property
    def is_loopback(self) -> bool:
        """Whether it leads back to whoever uses it."""
        return _bare(self.address).is_loopback

    def __str__(self) -> str:
        """As it can be given to getaddrinfo, also where it needs its network interface."""
        if self.scope and "%" not in self.address:
            return f"{self.address}%{socket.if_indextoname(self.scope)}"
        return self.address


def resolve(host: str) -> list[Place]:
    """The addresses of a host name, or of an address; raises OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, "no name of a host") from None
    return [
        Place(family, str(full[0]), int(full[-1]) if family is socket.AF_INET6 else 0)
        for family, _kind, _protocol, _name, full in found
    ]


def is_ours(place: Place) -> bool:
    """Whether an address is one of this host's."""
    return not _bare(place.address).is_unspecified and bind_error(place, 0) == 0


def bind_error(place: Place, port: int) -> int:
    """0 where a socket can be bound there and nobody listens, else the error number.

    It does not listen itself: that could be in the way of a server which starts at this moment.
    """
    try:
        with socket.socket(place.family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place.with_port(port))
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0


def means_loopback(host: str) -> bool:
    """Whether a host is named so that it can only be the one on which the name is read."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return _bare(host).is_loopback
    except ValueError:
        return False


def _bare(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])
