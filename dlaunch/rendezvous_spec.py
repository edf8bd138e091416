"""How the nodes of a run meet and stay together, as the user asked for it. Loaded only where a run has several."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from .addresses import host_and_port
from .environ import PASSWORD_VARIABLE
from .errors import UsageError
from .spec import above, at_least


class JoinPolicy(Enum):
    """When a running job that has room takes in a node that came later."""

    NOW = "now"
    AT_RESTART = "at-restart"  # with the next round that forms for another reason
    SETTLE = "settle"  # once no further node has come for a while


LEAST_LEASE_S = 2.0  # a busy etcd cannot be trusted to renew faster


@dataclass(frozen=True, slots=True)
class RendezvousSpec:
    """How the nodes of a run meet and stay together; a run on one node has none."""

    min_nodes: int
    max_nodes: int
    endpoints: tuple[str, ...]  # host:port or [v6]:port: the members of one etcd
    embedded: bool = False  # a private etcd at the one endpoint, run by the node that owns it
    is_host: bool | None = None  # embedded: whether this node owns it; None: the node that has this address does
    node_rank: int | None = None  # this node's wish for its group rank
    local_addr: str | None = None  # this node's address for its peers; None: the one that leads to the endpoints
    key_prefix: str = "/dlaunch"  # the run's keys begin with <key_prefix>/<run_id>/
    https: bool = False  # TLS although no file is named: the system's authorities are trusted
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password_file: Path | None = None  # counts before the password
    password: str | None = field(default=None, repr=False)
    lease_ttl_s: float = 5.0
    outage_limit_s: float = 120.0  # how long healthy training goes on without the store
    join: JoinPolicy = JoinPolicy.NOW
    join_settle_s: float = 0.0  # of JoinPolicy.SETTLE, since the last arrival
    settle_s: float = 2.0  # how long the first round waits, once the minimum is in, since the last arrival
    timeout_s: float = 600.0  # how long a node waits for enough others
    max_node_failures: int | None = None  # that a host's workers may begin before it is set aside; None: any number
    cool_down_s: float = 600.0  # how long a host stays set aside

    @property
    def tls(self) -> bool:
        """Whether the store is spoken to through TLS."""
        return self.https or self.ca_file is not None or self.cert_file is not None

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise UsageError(f"--nnodes is {self.min_nodes}:{self.max_nodes}.", "Give MIN:MAX with 1 <= MIN <= MAX.")
        self._check_endpoints()
        self._check_access()
        at_least("lease-ttl", self.lease_ttl_s, LEAST_LEASE_S)
        at_least("outage-limit", self.outage_limit_s, 0)
        at_least("join", self.join_settle_s, 0)
        at_least("rdzv-conf last_call_timeout", self.settle_s, 0)
        above("rdzv-timeout", self.timeout_s, 0)
        at_least("cool-down", self.cool_down_s, 0)
        if self.max_node_failures is not None:
            at_least("max-node-failures", self.max_node_failures, 1)
        if self.node_rank is not None:
            at_least("node-rank", self.node_rank, 0)

    def _check_endpoints(self) -> None:
        for endpoint in self.endpoints:
            try:
                host_and_port(endpoint)
            except ValueError:
                raise UsageError(
                    f"--rdzv-endpoint holds {endpoint!r}.", "Give HOST:PORT, an IPv6 address in brackets."
                ) from None
        if not self.endpoints or (self.embedded and len(self.endpoints) > 1):
            raise UsageError(
                f"--rdzv-endpoint names {len(self.endpoints)} places.",
                "Give one for a private etcd, or the members of an etcd.",
            )

    def _check_access(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            given, missing = ("cert", "key") if self.key_file is None else ("key", "cert")
            raise UsageError(f"--rdzv-{given} is given without --rdzv-{missing}.", "Give both, or none.")
        has_password = self.password is not None or self.password_file is not None
        if self.user is not None and not has_password:
            raise UsageError(
                f"--rdzv-user is {self.user!r}, but there is no password.",
                f"Give --rdzv-password-file, or set {PASSWORD_VARIABLE}.",
            )
        if self.user is None and has_password:
            raise UsageError("There is a password for etcd, but no user.", "Give --rdzv-user.")
