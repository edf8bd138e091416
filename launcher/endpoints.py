"""Where several nodes meet: in an etcd that is there, or in a private one that a node runs at its endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlaunch.addresses import join_host_and_port
from dlaunch.errors import UsageError

from . import grammar
from .settings import Setting

Settings = Mapping[str, Setting]

_ETCD_BACKENDS = ("etcd", "etcd-v2")
_ETCD_PORT = 2379
_C10D_PORT = 29400  # torchrun's defaults
_STATIC_PORT = 29500


class Endpoint(NamedTuple):
    """A place to meet, as it was written."""

    host: str  # an IPv6 address has no brackets here
    port: int | None  # None: not said

    def at(self, default_port: int) -> str:
        """``host:port`` or ``[v6]:port``."""
        return join_host_and_port(self.host, default_port if self.port is None else self.port)


def parse_endpoints(setting: Setting) -> tuple[Endpoint, ...]:
    """``HOST[:PORT],...``, each once, an IPv6 address in brackets; none where nothing was given."""
    text = setting.value.strip()
    if "@" in text:  # not repeated: what stands before it may be a password
        raise UsageError(
            f"{setting.origin} names a user.", "Give HOST:PORT alone, with --rdzv-user and --rdzv-password-file."
        )
    if "://" in text:
        raise setting.wrong("Leave http:// out; for TLS, leave https:// out and give --rdzv-ca.")
    return tuple(dict.fromkeys(_endpoint(part.strip(), setting) for part in text.split(","))) if text else ()


def _endpoint(text: str, setting: Setting) -> Endpoint:
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text)
    name, tail = bracketed.groups() if bracketed else _split_port(text)
    if not re.fullmatch(grammar.HOST, name) or (tail is not None and not re.fullmatch(grammar.PORT, tail)):
        raise setting.wrong("Give HOST or HOST:PORT, for instance node0:29400 or [::1]:29400.")
    if not bracketed and ":" in name:
        raise setting.wrong("Put an IPv6 address in brackets, for instance [::1]:29400.")
    if tail is not None and int(tail) > grammar.MAX_PORT:
        raise setting.wrong(f"Give a port from 0 to {grammar.MAX_PORT}.")
    return Endpoint(name, None if tail is None else int(tail))


def _split_port(text: str) -> tuple[str, str | None]:
    name, colon, tail = text.rpartition(":")
    return (name, tail) if colon else (text, None)


def uses_etcd(backend: Setting, endpoints: Sequence[Endpoint]) -> bool:
    """Whether the endpoints are of an etcd that is there, and not of a node.

    Where no backend is named, they are if there are several (a private etcd has one), or if etcd's port is named.
    """
    if not backend.is_default:
        return backend.value in _ETCD_BACKENDS
    return len(endpoints) > 1 or any(endpoint.port == _ETCD_PORT for endpoint in endpoints)


def static_endpoint(settings: Settings) -> Endpoint | None:
    """Where the workers of one node meet, as torchrun's static run has it; None where that is not what is named."""
    backend, endpoints = settings["rdzv_backend"], parse_endpoints(settings["rdzv_endpoint"])
    if not endpoints or uses_etcd(backend, endpoints):
        return None
    return _only(settings, endpoints)


def _only(settings: Settings, endpoints: Sequence[Endpoint]) -> Endpoint:
    if len(endpoints) > 1:
        backend = settings["rdzv_backend"].value
        raise settings["rdzv_endpoint"].wrong(f"With --rdzv-backend {backend} give one; several need etcd.")
    return endpoints[0]


def members_of_etcd(settings: Settings, endpoints: Sequence[Endpoint]) -> tuple[str, ...]:
    """The places of an etcd, each once; one that answers is enough."""
    if not endpoints:
        raise _nowhere(settings, "Give --rdzv-endpoint HOST[:PORT],...: the members of the etcd.")
    _refuse_port_zero(settings["rdzv_endpoint"], endpoints)
    return tuple(dict.fromkeys(endpoint.at(_ETCD_PORT) for endpoint in endpoints))


def private_etcd(settings: Settings, endpoints: Sequence[Endpoint]) -> str:
    """Where the node that owns the endpoint serves; a static run of torchrun's names it by ``--master-addr``."""
    backend, port = settings["rdzv_backend"], grammar.port(settings["master_port"])
    if endpoints:
        _refuse_port_zero(settings["rdzv_endpoint"], endpoints)
        return _only(settings, endpoints).at(_default_port(backend, port))
    if backend.value == "c10d":
        raise _nowhere(settings, "Give --rdzv-endpoint HOST[:PORT]: one of the nodes, the same on all.")
    if port == 0:
        raise settings["master_port"].wrong("Give a port above 0, the same on all nodes.")
    return Endpoint(_master(settings), port).at(_STATIC_PORT)


def _master(settings: Settings) -> str:
    """The host that must be named, unlike in torchrun: its default, 127.0.0.1, is another host on every node."""
    host = "" if settings["master_addr"].is_default else grammar.host(settings["master_addr"])
    if host:
        return host
    static = not settings["rdzv_backend"].is_default or not settings["node_rank"].is_default
    node = "Give --master-addr, the address of the node with --node-rank 0, the same on all."
    either = "Give --rdzv-endpoint HOST[:PORT],...: one of the nodes or the members of an etcd, the same on all."
    raise _nowhere(settings, node if static else either)


def _default_port(backend: Setting, master_port: int | None) -> int:
    """Of an endpoint without one."""
    if backend.value != "static":
        return _C10D_PORT
    return master_port or (_C10D_PORT if backend.is_default else _STATIC_PORT)


def _nowhere(settings: Settings, fix: str) -> UsageError:
    nnodes = settings["nnodes"]
    return UsageError(f"{nnodes.origin} is {nnodes.value!r}, but nothing says where the nodes meet.", fix)


def _refuse_port_zero(setting: Setting, endpoints: Sequence[Endpoint]) -> None:
    if any(endpoint.port == 0 for endpoint in endpoints):
        raise setting.wrong("Several nodes need a port that all know: give one above 0.")
