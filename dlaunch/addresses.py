"""``host:port`` as people write it, with an IPv6 host in brackets: put together, and taken apart."""

from __future__ import annotations


def join_host_and_port(host: str, port: int) -> str:
    """``host:port`` or ``[v6]:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of ``host:port`` or ``[v6]:port``; raises ValueError where they are not there."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"the IPv6 address in {address!r} has no brackets")
    if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)
