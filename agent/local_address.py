"""The address under which the other nodes of a run reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dlaunch.addresses import host_and_port
from dlaunch.errors import ConfigurationError, StoreUnreachable

from .own_address import Place, is_ours, means_loopback, resolve

# Addresses that belong to nobody (RFC 5737, RFC 3849): the way there is the way out of this host.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_SOME_PORT = 9  # UDP; nothing is sent


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
            return str(_source_towards(host, port))
        except OSError as error:
            troubles.append(f"{endpoint} ({error.strerror or 'not found'})")
    raise StoreUnreachable(
        f"No endpoint of the store can be found from here: {', '.join(troubles)}.",
        "Check --rdzv-endpoint, and that its name resolves on this host.",
    )


def _wished(wish: str) -> str:
    try:
        places = resolve(wish.strip("[]"))
    except OSError as error:
        raise ConfigurationError(
            f"--local-addr {wish} cannot be resolved ({error.strerror or 'not found'}).",
            "Give an address of this host.",
        ) from None
    for place in places:
        if is_ours(place):
            return str(place)
    shown = ", ".join(map(str, places))
    raise ConfigurationError(
        f"--local-addr {wish} is not an address of this host" + (f" (it is {shown})." if shown != wish else "."),
        "Give an address or a name of this host that the other nodes can reach.",
    )


def _source_towards(host: str, port: int) -> Place:
    """The source address of the route to an endpoint; raises OSError."""
    failed: OSError | None = None
    for place in resolve(host):
        try:
            found = _source(place, port)
        except OSError as error:
            failed = error
            continue
        return _way_out(found) if found.is_loopback and not means_loopback(host) else found
    raise failed or OSError("it has no address")


def _way_out(loopback: Place) -> Place:
    """For a name of this host that /etc/hosts gives a loopback address, as some systems do: others know it by another.

    Where there is no way out of this host, the loopback address it is.
    """
    try:
        return _source(Place(loopback.family, _ELSEWHERE[loopback.family]), _SOME_PORT)
    except OSError:
        return loopback


def _source(place: Place, port: int) -> Place:
    with socket.socket(place.family, socket.SOCK_DGRAM) as sock:  # connecting UDP chooses a route and sends nothing
        sock.connect(place.with_port(port))
        name = sock.getsockname()
    return Place(place.family, name[0], name[3] if place.family is socket.AF_INET6 else 0)
