"""``--rdzv-conf``: what torchrun's keys mean here.

Sources for the keys and their defaults: torch 2.13, in ``torch/distributed/elastic/rendezvous/``
``dynamic_rendezvous.py`` (the timeouts and the keep-alive), ``c10d_rendezvous_backend.py``,
``etcd_rendezvous_backend.py``, ``etcd_rendezvous.py`` and ``static_tcp_rendezvous.py``.

torchrun ignores a key that it does not know. We refuse it: a timeout with a slip in its name would otherwise be one
that was never set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dlaunch.errors import UsageError
from dlaunch.rendezvous_spec import LEAST_LEASE_S

from . import grammar
from .settings import Setting, truth

_KEEP_ALIVE_INTERVAL_S = 5.0  # torchrun's defaults
_KEEP_ALIVE_ATTEMPTS = 3

# Checked, and of no effect: there is nothing here that would take that long, or it has no choice.
WITHOUT_EFFECT = ("close_timeout", "heartbeat_timeout", "read_timeout", "store_type")
KEYS = (
    "join_timeout",
    "timeout",
    "last_call_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
    "protocol",
    "ca_cert",
    "cacert",
    "ssl_cert",
    "cert",
    "ssl_cert_key",
    "key",
    "etcd_prefix",
    *WITHOUT_EFFECT,
)


class Conf(NamedTuple):
    """What it says; None for what it does not mention."""

    timeout_s: float | None
    settle_s: float | None
    lease_ttl_s: float | None
    is_host: bool | None
    https: bool | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    key_prefix: str | None


def read_conf(setting: Setting) -> Conf:
    """The meaning of ``KEY=VALUE,...``; raises UsageError for an unknown key or a value that makes no sense."""
    given = _by_key(setting)
    _check_what_has_no_effect(given)
    settle, is_host, prefix = (given.get(key) for key in ("last_call_timeout", "is_host", "etcd_prefix"))
    protocol = given.get("protocol")
    return Conf(
        timeout_s=_positive_seconds(given, "join_timeout", "timeout"),
        settle_s=None if settle is None else grammar.seconds(settle),
        lease_ttl_s=_lease_ttl(given),
        is_host=None if is_host is None else truth(is_host),
        https=None if protocol is None else grammar.choice(protocol, ("http", "https")) == "https",
        ca_file=_path(given, "ca_cert", "cacert"),
        cert_file=_path(given, "ssl_cert", "cert"),
        key_file=_path(given, "ssl_cert_key", "key"),
        key_prefix=None if prefix is None else key_prefix(prefix),
    )


def _by_key(setting: Setting) -> dict[str, Setting]:
    pairs = dict(grammar.configuration(setting))
    for key in pairs:
        if key not in KEYS:
            raise UsageError(f"{setting.origin} has no key {key!r}.", _suggestion(key))
    return {key: Setting(value, f"{setting.origin} {key}") for key, value in pairs.items()}


def _suggestion(key: str) -> str:
    from difflib import get_close_matches  # noqa: PLC0415  -- only a mistake pays for it

    close = get_close_matches(key, KEYS, n=1)
    return f"Did you mean {close[0]}?" if close else f"Give one of {', '.join(KEYS)}."


def _check_what_has_no_effect(given: Mapping[str, Setting]) -> None:
    for key in WITHOUT_EFFECT:
        if key not in given:
            continue
        if key != "store_type":
            grammar.positive_seconds(given[key])
        elif given[key].value.lower() != "tcp":
            raise given[key].wrong("Nodes meet over the network only: leave it out, or give tcp.")


def _positive_seconds(given: Mapping[str, Setting], *keys: str) -> float | None:
    """Of the first key that is there; all are checked."""
    values = [grammar.positive_seconds(given[key]) for key in keys if key in given]
    return next(iter(values), None)


def _lease_ttl(given: Mapping[str, Setting]) -> float | None:
    """torchrun takes a node for lost after so many missed keep-alives; a lease lapses after the same time."""
    if "keep_alive_interval" not in given and "keep_alive_max_attempt" not in given:
        return None
    interval_s = _positive_seconds(given, "keep_alive_interval") or _KEEP_ALIVE_INTERVAL_S
    attempts = given.get("keep_alive_max_attempt")
    missed = _KEEP_ALIVE_ATTEMPTS if attempts is None else grammar.whole_number(attempts, least=1)
    return max(LEAST_LEASE_S, interval_s * missed)


def key_prefix(setting: Setting) -> str:
    """Where the keys of runs begin in the store: it starts with a slash, and does not end with one."""
    text = "/" + setting.value.strip().strip("/")
    if text == "/" or not text.isprintable() or "//" in text:
        raise setting.wrong("Give a path such as /dlaunch.")
    return text


def _path(given: Mapping[str, Setting], *keys: str) -> Path | None:
    return next((Path(given[key].value) for key in keys if key in given), None)
