"""From settings to how the nodes of a run meet: a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dlaunch.environ import PASSWORD_VARIABLE
from dlaunch.errors import UsageError
from dlaunch.rendezvous_spec import LEAST_LEASE_S, JoinPolicy, RendezvousSpec

from . import grammar
from .endpoints import members_of_etcd, parse_endpoints, private_etcd, uses_etcd
from .rdzv_conf import Conf, read_conf
from .settings import Setting

Settings = Mapping[str, Setting]

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_KEY_PREFIX = "/dlaunch"
_SETTLE_S = 2.0
_LONGEST_RUN_ID = 255
_NAMELESS_RUN = "none"  # as torchrun names it


def rendezvous_spec(settings: Settings, environ: Mapping[str, str], *, standalone: bool) -> RendezvousSpec | None:
    """How the nodes meet; None for one node, whose settings are checked all the same.

    Raises UsageError. Reads no file, and looks no name up.
    """
    least, most = grammar.nodes(settings["nnodes"])
    backend = grammar.choice(settings["rdzv_backend"], _BACKENDS)
    endpoints = parse_endpoints(settings["rdzv_endpoint"])
    embedded = not uses_etcd(settings["rdzv_backend"], endpoints)
    node_rank = _node_rank(settings["node_rank"], most, static=embedded and backend == "static")
    conf = read_conf(settings["rdzv_conf"])
    changes = _changes(settings, conf)
    if most == 1:
        return None
    if standalone:
        nnodes = settings["nnodes"]
        raise UsageError(f"--standalone is for one node, and {nnodes.origin} is {nnodes.value!r}.", "Leave one out.")
    access = _no_access(settings, conf) if embedded else _access(settings, conf, environ)
    return RendezvousSpec(
        min_nodes=least,
        max_nodes=most,
        endpoints=(private_etcd(settings, endpoints),) if embedded else members_of_etcd(settings, endpoints),
        embedded=embedded,
        is_host=_is_host(conf, node_rank, static=backend == "static") if embedded else None,
        node_rank=node_rank,
        local_addr=grammar.host(settings["local_addr"]) or None,
        **access._asdict(),
        **changes._asdict(),
    )


class _Access(NamedTuple):
    """The part of a `RendezvousSpec` that leads into the store."""

    key_prefix: str
    https: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password_file: Path | None = None
    password: str | None = None


class _Changes(NamedTuple):
    """The part of a `RendezvousSpec` about nodes that come and go."""

    lease_ttl_s: float
    outage_limit_s: float
    join: JoinPolicy
    join_settle_s: float
    settle_s: float
    timeout_s: float
    max_node_failures: int | None
    cool_down_s: float


def _access(settings: Settings, conf: Conf, environ: Mapping[str, str]) -> _Access:
    password_file = _path(settings["rdzv_password_file"])
    return _Access(
        key_prefix=conf.key_prefix or _KEY_PREFIX,
        https=conf.https is True,
        ca_file=_path(settings["rdzv_ca"]) or conf.ca_file,
        cert_file=_path(settings["rdzv_cert"]) or conf.cert_file,
        key_file=_path(settings["rdzv_key"]) or conf.key_file,
        user=settings["rdzv_user"].value or None,
        password_file=password_file,
        password=None if password_file else _password(environ),
    )


def _no_access(settings: Settings, conf: Conf) -> _Access:
    """A private etcd has no users and no TLS: what asks for them is refused, lest somebody relies on it."""
    dests = ("rdzv_user", "rdzv_password_file", "rdzv_ca", "rdzv_cert", "rdzv_key")
    wishes = [settings[dest].origin for dest in dests if settings[dest].value]
    if conf.https or conf.ca_file or conf.cert_file or conf.key_file:
        wishes.append("TLS in --rdzv-conf")
    if wishes:
        raise UsageError(
            f"{wishes[0]} is for an etcd of yours, and this run starts a private one.",
            "Leave it out, or give --rdzv-backend etcd.",
        )
    return _Access(conf.key_prefix or _KEY_PREFIX)


def _changes(settings: Settings, conf: Conf) -> _Changes:
    join, join_settle_s = join_policy(settings["join"])
    lease_ttl_s = grammar.seconds(settings["lease_ttl"], least=LEAST_LEASE_S)
    timeout_s = grammar.above_zero(settings["rdzv_timeout"])
    return _Changes(
        lease_ttl_s=_stronger(settings["lease_ttl"], lease_ttl_s, conf.lease_ttl_s),
        outage_limit_s=grammar.seconds(settings["outage_limit"]),
        join=join,
        join_settle_s=join_settle_s,
        settle_s=_SETTLE_S if conf.settle_s is None else conf.settle_s,
        timeout_s=_stronger(settings["rdzv_timeout"], timeout_s, conf.timeout_s),
        max_node_failures=_optional_number(settings["max_node_failures"]),
        cool_down_s=grammar.seconds(settings["cool_down"]),
    )


def run_id(setting: Setting, rendezvous: RendezvousSpec | None, new_run_id: str) -> str:
    """The id of the run. Nodes that meet in a common etcd must share one; it is part of the keys there."""
    if rendezvous is None:
        return setting.value or new_run_id
    if not setting.value.strip():
        if rendezvous.embedded:
            return _NAMELESS_RUN  # of this one store, and so of one run
        raise UsageError("Nodes that meet in an etcd need a name for their run.", "Give --rdzv-id, the same on all.")
    if "/" in setting.value or not setting.value.isprintable() or len(setting.value) > _LONGEST_RUN_ID:
        raise setting.wrong(f"With several nodes, give up to {_LONGEST_RUN_ID} characters without a slash.")
    return setting.value


def _node_rank(setting: Setting, most: int, *, static: bool) -> int | None:
    """None where none was given: each static node would else be the first, as under torchrun."""
    rank = grammar.whole_number(setting)
    if static and rank >= most:
        many = f"There are {most} nodes, so give 0 to {most - 1}."
        raise setting.wrong(many if most > 1 else "There is one node, so give 0; or say --nnodes.")
    return None if setting.is_default else rank


def _is_host(conf: Conf, node_rank: int | None, *, static: bool) -> bool | None:
    """torchrun's static run is served by the node with rank 0; otherwise ``is_host`` or the address decides."""
    if conf.is_host is not None or not static or node_rank is None:
        return conf.is_host
    return node_rank == 0


def _password(environ: Mapping[str, str]) -> str | None:
    value = environ.get(PASSWORD_VARIABLE) or None
    try:
        (value or "").encode()
    except UnicodeEncodeError:  # the value is not repeated
        raise UsageError(f"{PASSWORD_VARIABLE} is not UTF-8.", "Give the password as text.") from None
    return value


def join_policy(setting: Setting) -> tuple[JoinPolicy, float]:
    """``now``, ``at-restart``, or the seconds without an arrival after which a job grows."""
    text = setting.value.strip()
    if text in (JoinPolicy.NOW.value, JoinPolicy.AT_RESTART.value):
        return JoinPolicy(text), 0.0
    value = grammar.finite(text)
    if value is None or value < 0:
        raise setting.wrong("Give now, at-restart or a number of seconds.")
    return (JoinPolicy.SETTLE, value) if value else (JoinPolicy.NOW, 0.0)


def _stronger(setting: Setting, value: float, of_conf: float | None) -> float:
    """A flag or its variable counts before ``--rdzv-conf``, which counts before the default."""
    return of_conf if setting.is_default and of_conf is not None else value


def _optional_number(setting: Setting) -> int | None:
    return grammar.whole_number(setting, least=1) if setting.value else None


def _path(setting: Setting) -> Path | None:
    return Path(setting.value) if setting.value.strip() else None
