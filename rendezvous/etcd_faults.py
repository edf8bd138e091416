"""What an error of etcd or gRPC means: its sort, whether the request may have taken effect, what may help. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from .store import StoreError, Trouble


class Help(Enum):
    """What may help a request that failed at one endpoint."""

    NOTHING = "nothing"  # the cluster has spoken; another endpoint would say the same
    ANOTHER_ENDPOINT = "another-endpoint"  # this one will say the same again
    ANOTHER_TRY = "another-try"  # here or at another endpoint
    NEW_TOKEN = "new-token"  # our token of authentication is worth nothing any more


class Fault(NamedTuple):
    """One failure at one endpoint, in a few words that fit behind its name."""

    trouble: Trouble
    words: str
    help: Help = Help.ANOTHER_TRY
    maybe_done: bool = False  # the request was sent, and may have taken effect or do so yet
    head: str = ""  # in place of what is usually said of this sort of trouble

    @property
    def is_lasting(self) -> bool:
        """Whether this endpoint would say the same again."""
        return self.help in {Help.NOTHING, Help.ANOTHER_ENDPOINT}

    @property
    def is_of_token(self) -> bool:
        """Whether a user of etcd does better with a new token."""
        return self.help is Help.NEW_TOKEN or self == _SAID[_NO_USER]

    @property
    def is_without_users(self) -> bool:
        """Whether etcd does not know users at all, so that no token is needed."""
        return self == _SAID[_NO_USERS]


# What etcd's messages mean. Source: etcd 3.5, api/v3rpc/rpctypes/error.go; where a message is sent: server/etcdserver.
_NO_USER = "etcdserver: user name is empty"
_NO_USERS = "etcdserver: authentication is not enabled"
_SAID = {
    # Refused by an interceptor, before anything was done.
    "etcdserver: no leader": Fault(Trouble.NO_QUORUM, "it has no leader"),
    "etcdserver: too many requests": Fault(Trouble.TIMEOUT, "it is overloaded"),
    "etcdserver: rpc not supported for learner": Fault(Trouble.NO_QUORUM, "it is a learner, no full member yet"),
    "etcdserver: server stopped": Fault(Trouble.UNREACHABLE, "it is shutting down", maybe_done=True),
    # The proposal is under way or lost.
    "etcdserver: leader changed": Fault(Trouble.NO_QUORUM, "its leader changed", maybe_done=True),
    "etcdserver: request timed out": Fault(Trouble.NO_QUORUM, "its members did not agree in time", maybe_done=True),
    # Authentication: checked before a proposal, and again (auth store is old) before it is applied.
    "etcdserver: invalid auth token": Fault(Trouble.DENIED, "it does not know our token", Help.NEW_TOKEN),
    "etcdserver: revision of auth store is old": Fault(Trouble.DENIED, "our token is outdated", Help.NEW_TOKEN),
    _NO_USERS: Fault(Trouble.DENIED, "it has no users", Help.NOTHING),
    _NO_USER: Fault(Trouble.DENIED, "it asks for a user and a password", Help.NOTHING),
    "etcdserver: authentication failed": Fault(Trouble.DENIED, "it rejects the user or the password", Help.NOTHING),
    "etcdserver: permission denied": Fault(Trouble.DENIED, "the user may not use these keys", Help.NOTHING),
    # Refused for what the request is.
    "etcdserver: requested lease not found": Fault(Trouble.NO_LEASE, "the lease does not exist", Help.NOTHING),
    "etcdserver: request is too large": Fault(Trouble.TOO_LARGE, "the request is too large", Help.NOTHING),
    "etcdserver: too many operations": Fault(Trouble.TOO_LARGE, "the transaction has too many parts", Help.NOTHING),
    "etcdserver: mvcc: database space exceeded": Fault(Trouble.OTHER, "its space is used up", Help.NOTHING),
}
_NEVER_SENT = ("failed to connect to all addresses", "DNS resolution failed", "empty address list")
_OTHER_SERVER = Fault(Trouble.WRONG_SERVER, "what answers is not etcd with its v3 API", Help.ANOTHER_ENDPOINT)
_CODES = {
    "UNIMPLEMENTED": _OTHER_SERVER,
    "DEADLINE_EXCEEDED": Fault(Trouble.TIMEOUT, "no answer", maybe_done=True),
    "UNAUTHENTICATED": Fault(Trouble.DENIED, "it does not know our token", Help.NEW_TOKEN),
}
_BROKEN = {"UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED", "DATA_LOSS"}


def fault_of(code: str, details: str) -> Fault:
    """What a gRPC status code (by its name) and its details, from one endpoint, mean."""
    for said, fault in _SAID.items():
        if said in details:
            return fault
    if "Received http2 header with status" in details:
        return _OTHER_SERVER
    if code in _CODES:
        return _CODES[code]
    if code in _BROKEN:
        return _broken(details)
    return Fault(Trouble.OTHER, f"{code}: {_shown(details)}", Help.NOTHING)


def _broken(details: str) -> Fault:
    if any(text in details for text in _NEVER_SENT):
        return Fault(Trouble.UNREACHABLE, "it cannot be connected to")
    return Fault(Trouble.UNREACHABLE, f"the connection broke ({_shown(details)})", maybe_done=True)


def _shown(details: str) -> str:
    """Words of a stranger, made fit for one sentence."""
    return "".join(letter if letter.isprintable() else " " for letter in details)[:120].strip().rstrip(".")


_HEADS = {
    Trouble.UNREACHABLE: "etcd cannot be reached",
    Trouble.TIMEOUT: "etcd did not answer",
    Trouble.NO_QUORUM: "etcd has no quorum of its members",
    Trouble.DENIED: "etcd does not let us in",
    Trouble.WRONG_SERVER: "What listens there is not etcd with its v3 API",
    Trouble.NO_LEASE: "etcd refuses the write",
    Trouble.TOO_LARGE: "etcd does not take this",
    Trouble.OTHER: "etcd failed",
}
# Of different troubles at different endpoints, the one that says most of the cluster.
_WEIGHT = (Trouble.NO_QUORUM, Trouble.TIMEOUT, Trouble.UNREACHABLE, Trouble.OTHER, Trouble.DENIED, Trouble.WRONG_SERVER)


def error_of(faults: Mapping[str, Fault], *, within_s: float | None = None) -> StoreError:
    """One error for a request that failed at these endpoints, in one sentence."""
    troubles = {fault.trouble for fault in faults.values()}
    trouble = next((one for one in _WEIGHT if one in troubles), None) or next(iter(troubles))
    names: dict[str, list[str]] = {}
    for name, fault in faults.items():
        names.setdefault(fault.words, []).append(name)
    each = "; ".join(f"{', '.join(at)}: {words}" for words, at in names.items())
    within = "" if within_s is None else f" within {within_s:g} s"
    heads = {fault.head or _HEADS[trouble] for fault in faults.values() if fault.trouble is trouble}
    head = heads.pop() if len(heads) == 1 else _HEADS[trouble]
    return StoreError(trouble, f"{head}{within}: {each}.", any(fault.maybe_done for fault in faults.values()))


def fault_of_cluster(found: int, ours: int) -> Fault:
    """An endpoint is of another cluster than the one that we began with."""
    words = f"it is of the cluster {found:x}, and we began with {ours:x} (was it set up or restored anew?)"
    return Fault(Trouble.WRONG_SERVER, words, Help.ANOTHER_ENDPOINT, head="Another etcd answers")


def different_clusters(found: Mapping[int, Iterable[str]]) -> StoreError:
    """The endpoints, by the id of their cluster, are of more than one."""
    each = "; ".join(f"{', '.join(names)} of {cluster:x}" for cluster, names in found.items())
    return StoreError(Trouble.WRONG_SERVER, f"The endpoints are of {len(found)} different clusters of etcd: {each}.")
