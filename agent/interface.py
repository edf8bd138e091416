"""Which network interface the workers should meet each other through, where they cannot find out by themselves."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address

_VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_variables(address: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What gloo has to be told so that workers of several nodes find each other; nothing where it knows.

    Gloo offers its peers the address that this host's own name resolves to, and a loopback address where it resolves to
    none or to that (containers; Debian's 127.0.1.1). Then the interface of ``address``, this node's, is named to it.
    Source: torch 2.13, ProcessGroupGloo.cpp, createDefaultDevice.
    """
    if _VARIABLE in inherited or ip_address(address.partition("%")[0]).is_loopback or _own_name_leads_out():
        return {}
    name = interface_of(address)
    return {_VARIABLE: name} if name else {}


def interface_of(address: str) -> str | None:
    """The interface that holds an address of this host."""
    import psutil  # noqa: PLC0415  -- 20 ms, for hosts whose name does not resolve

    wanted = ip_address(address.partition("%")[0])
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in {socket.AF_INET, socket.AF_INET6} and _is(entry.address, wanted):
                return name
    return None


def _is(text: str, wanted: object) -> bool:
    return ip_address(text.partition("%")[0]) == wanted


def _own_name_leads_out() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ip_address(str(place[4][0]).partition("%")[0]).is_loopback for place in found)
