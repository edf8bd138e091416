"""Where etcd is and how to get in: endpoints, certificates, user. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dlaunch.addresses import join_host_and_port
from dlaunch.errors import ConfigurationError, UsageError

DEFAULT_PORT = 2379  # etcd's own, for clients
_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%a-z]+)\]|(?P<host>[^\s:/\[\]@,]+))(?::(?P<port>[0-9]{1,5}))?")


class Endpoint(NamedTuple):
    """One address of etcd."""

    host: str  # a DNS name, or an address without brackets
    port: int

    def __str__(self) -> str:
        return join_host_and_port(self.host, self.port)


def parse_endpoint(text: str) -> Endpoint:
    """``host``, ``host:port``, ``[v6]`` or ``[v6]:port``; raises UsageError."""
    found = _ENDPOINT.fullmatch(text.strip())
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise UsageError(
            f"{text!r} is no endpoint of etcd.",
            "Give host:port, or [address]:port for IPv6, without a scheme or a path.",
        )
    return Endpoint(found["v6"] or found["host"], port)


class EtcdSettings(NamedTuple):
    """How to reach etcd. Its text form never shows the password."""

    endpoints: tuple[str, ...]  # as `parse_endpoint` takes them
    ca: str = ""  # files, PEM; any of the three turns TLS on
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""
    try_s: float = 1.0  # how long one endpoint may be silent before another is asked
    tls: bool = False  # TLS without files: the system's authorities, no certificate of our own

    def __repr__(self) -> str:
        shown = {**self._asdict(), "password": "***" if self.password else ""}
        return f"EtcdSettings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls or bool(self.ca or self.cert or self.key)


class Certificates(NamedTuple):
    """What the files of the settings hold, PEM; None: not given."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


def read_certificates(settings: EtcdSettings) -> Certificates:
    """Read the files that the settings name; raises ConfigurationError."""
    if bool(settings.cert) != bool(settings.key):
        given, missing = ("certificate", "key") if settings.cert else ("key", "certificate")
        raise ConfigurationError(f"A client {given} for etcd is given without its {missing}.", "Give both.")
    return Certificates(*(_read(name) if name else None for name in (settings.ca, settings.cert, settings.key)))


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"The file {name} for etcd's TLS cannot be read: {error.strerror}.") from None
