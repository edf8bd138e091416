"""The address under which the other nodes of a run reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

from dlaunch.errors import ConfigurationError, StoreUnreachable
from dlaunch.rendezvous_spec import host_and_port

# Addresses that belong to nobody (RFC 5737, RFC 3849): the way there is the way out of this host.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_SOME_PORT = 9  # UDP; nothing is sent


class _Place(NamedTuple):
    family: socket.AddressFamily
    address: str
    scope: int = 0  # the network interface of a link-local IPv6 address


def local_address(endpoints: Sequence[str], wish: str | None) -> str:
    """A numeric address of this host: the wish (``--local-addr``), else the one that leads to the first endpoint.

    An endpoint on this very host, given by a loopback address, means that all nodes are here: a loopback address then.
    Raises ConfigurationError where the wish is not an address of this host, and StoreUnreachable where no endpoint can
    be resolved or there is no way to any.
    """
    if wish is not None:
        return _wished(wish)
    troubles = []
    for endpoint in endpoints:
        host, port = host_and_port(endpoint)
        try:
            return _source_towards(host, port)
        except OSError as error:
            troubles.append(f"{endpoint} ({error.strerror or 'not found'})")
    raise StoreUnreachable(
        f"No endpoint of the store can be found from here: {', '.join(troubles)}.",
        "Check --rdzv-endpoint, and that its name resolves on this host.",
    )


def _wished(wish: str) -> str:
    try:
        places = _resolve(wish.strip("[]"))
    except OSError as error:
        raise ConfigurationError(
            f"--local-addr {wish} cannot be resolved ({error.strerror or 'not found'}).",
            "Give an address of this host.",
        ) from None
    for place in places:
        if _is_ours(place):
            return _text(place)
    shown = ", ".join(_text(place) for place in places)
    raise ConfigurationError(
        f"--local-addr {wish} is not an address of this host" + (f" (it is {shown})." if shown != wish else "."),
        "Give an address or a name of this host that the other nodes can reach.",
    )


def _source_towards(host: str, port: int) -> str:
    """The source address of the route to an endpoint; raises OSError."""
    failed: OSError | None = None
    for place in _resolve(host):
        try:
            found = _source(place, port)
        except OSError as error:
            failed = error
            continue
        if _is_loopback(found.address) and not _means_loopback(host):
            return _text(_way_out(found))
        return _text(found)
    raise failed or OSError("it has no address")


def _way_out(loopback: _Place) -> _Place:
    """For a name of this host that /etc/hosts gives a loopback address, as some systems do: others know it by another.

    Where there is no way out of this host, the loopback address it is.
    """
    try:
        return _source(_Place(loopback.family, _ELSEWHERE[loopback.family]), _SOME_PORT)
    except OSError:
        return loopback


def _source(place: _Place, port: int) -> _Place:
    with socket.socket(place.family, socket.SOCK_DGRAM) as sock:  # connecting UDP chooses a route and sends nothing
        sock.connect(_full(place, port))
        name = sock.getsockname()
    return _Place(place.family, name[0], name[3] if place.family is socket.AF_INET6 else 0)


def _resolve(host: str) -> list[_Place]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(0, "no name of a host") from None
    return [
        _Place(family, str(place[0]), int(place[-1]) if family is socket.AF_INET6 else 0)
        for family, _kind, _protocol, _name, place in found
    ]


def _is_ours(place: _Place) -> bool:
    try:
        with socket.socket(place.family, socket.SOCK_STREAM) as sock:
            sock.bind(_full(place, 0))
    except OSError:
        return False
    return not ip_address(place.address.partition("%")[0]).is_unspecified


def _full(place: _Place, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    if place.family is socket.AF_INET6:
        return (place.address, port, 0, place.scope)
    return (place.address, port)


def _text(place: _Place) -> str:
    """The address as it can be given to getaddrinfo, also where it needs its network interface."""
    if place.scope and "%" not in place.address:
        return f"{place.address}%{socket.if_indextoname(place.scope)}"
    return place.address


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _means_loopback(host: str) -> bool:
    """Whether an endpoint asks for this host only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return _is_loopback(host)
    except ValueError:
        return False
