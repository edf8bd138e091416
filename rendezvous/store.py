"""What the agreement needs of a store: transactions, leases and watches, as etcd v3 has them.

Requests and answers are values. A store takes a request and calls back, once, with an answer or a `StoreError`; it
never blocks its caller and never calls back before `request` has returned. So the same code runs on etcd, on memory
and on a virtual clock.

Keys are text; values are bytes. Revisions are etcd's: one number for the whole store that grows with every write.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

MAX_OPERATIONS = 128  # of one transaction, compares and either branch each: etcd's default limit
MAX_REQUEST_BYTES = 1_500_000  # etcd's default limit, rounded down


class KeyValue(NamedTuple):
    """One key, as it stood at a revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0  # 0: none


# --- requests --------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """Read one key or, with ``end`` or ``prefix``, all keys of a range in the order of their names. Linearizable."""

    key: str
    prefix: bool = False
    end: str = ""  # exclusive; empty: only `key`, or all that start with it
    limit: int = 0  # 0: no limit
    keys_only: bool = False
    count_only: bool = False


class Put(NamedTuple):
    """Write a key; with a lease, it goes when the lease does."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Delete a key, or all that start with it."""

    key: str
    prefix: bool = False


class Target(Enum):
    """What of a key a transaction may compare."""

    CREATE_REVISION = "create"  # 0: the key does not exist
    MOD_REVISION = "mod"
    LEASE = "lease"
    VALUE = "value"


class Compare(NamedTuple):
    """A condition of a transaction: the target of the key equals the value (bytes for VALUE, else a number)."""

    key: str
    target: Target
    value: int | bytes


Operation = Range | Put | Delete


class Txn(NamedTuple):
    """Where all compares hold, do ``success``, else ``failure``; as one step. At most 128 of each."""

    compares: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()


class GrantLease(NamedTuple):
    """A new lease of so many whole seconds (etcd may give more: its floor is 2 s)."""

    ttl_s: int


class KeepAlive(NamedTuple):
    """Renew a lease."""

    lease: int


class RevokeLease(NamedTuple):
    """End a lease now, and all keys on it."""

    lease: int


class LookAtLease(NamedTuple):
    """Whether a lease exists, without renewing it. Answered by LeaseAlive."""

    lease: int


class GetVersion(NamedTuple):
    """The version of the server that answers."""


class CountMembers(NamedTuple):
    """How many servers the store is made of."""


Request = Range | Txn | GrantLease | KeepAlive | RevokeLease | LookAtLease | GetVersion | CountMembers

# --- answers ---------------------------------------------------------------------------------------------------------


class RangeAnswer(NamedTuple):
    """The keys found, at a revision of the whole store."""

    revision: int
    kvs: tuple[KeyValue, ...]
    count: int  # type: ignore[assignment]  # of all keys in the range, whatever the limit; hides tuple.count
    more: bool = False  # the limit cut the list


class TxnAnswer(NamedTuple):
    """What a transaction did."""

    revision: int
    succeeded: bool  # whether the compares held
    ranges: tuple[RangeAnswer, ...] = ()  # of the Range operations of the branch that was taken, in their order


class LeaseGranted(NamedTuple):
    """A lease that exists now."""

    revision: int
    lease: int
    ttl_s: int


class LeaseAlive(NamedTuple):
    """The answer to a renewal, or a look; ``ttl_s`` 0: there is no such lease (any more)."""

    revision: int
    ttl_s: int


class LeaseRevoked(NamedTuple):
    """The lease does not exist (any more)."""

    revision: int


class ServerVersion(NamedTuple):
    """As the server has it: "3.5.13". Not of a revision: any server may answer, however far behind."""

    version: str


class MemberCount(NamedTuple):
    """Voting or not. Not of a revision."""

    members: int


Answer = RangeAnswer | TxnAnswer | LeaseGranted | LeaseAlive | LeaseRevoked | ServerVersion | MemberCount


class Trouble(Enum):
    """What sort of failure a request met."""

    UNREACHABLE = "unreachable"  # no endpoint takes connections (refused, no route, DNS, TLS handshake)
    TIMEOUT = "timeout"  # nothing came back in time
    NO_QUORUM = "no-quorum"  # endpoints answer, but the cluster has no leader
    DENIED = "denied"  # user, password, certificate or permission
    WRONG_SERVER = "wrong-server"  # something answers that is not etcd v3
    NO_LEASE = "no-lease"  # the lease that a Put names does not exist
    TOO_LARGE = "too-large"  # of a request or a value
    OTHER = "other"


class StoreError(NamedTuple):
    """A request that failed. ``sentence`` is for people: it names the endpoints and no secret."""

    trouble: Trouble
    sentence: str
    maybe_done: bool = False  # a write that was sent, so it may have happened, or may happen yet

    @property
    def is_lasting(self) -> bool:
        """Whether trying again cannot help."""
        return self.trouble in {Trouble.DENIED, Trouble.WRONG_SERVER, Trouble.TOO_LARGE}


# --- watches ---------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """One key was written, or (``value`` None) deleted, by hand or by the end of its lease."""

    key: str
    value: bytes | None
    create_revision: int  # 0 for a deletion
    mod_revision: int
    lease: int = 0


class Changes(NamedTuple):
    """What a watch has heard: whole revisions, in order. A watch is a hint: events may be late, and have been lost."""

    revision: int
    changes: tuple[Change, ...]


class WatchLost(NamedTuple):
    """The watch is over and must be made anew after a list: its revision was compacted, or it cannot be resumed."""

    sentence: str


Heard = Callable[[Changes | WatchLost], None]
Answered = Callable[[Answer | StoreError], None]


class Watch(Protocol):
    """A watch that runs."""

    def cancel(self) -> None:
        """Hear nothing more."""


class Store(Protocol):
    """A store of keys. All callbacks come on the thread of its owner, one at a time, never from inside a call."""

    def request(self, request: Request, timeout_s: float, answered: Answered) -> None:
        """Perform ``request``; ``answered`` is called once, after at most ``timeout_s`` and a little.

        Reads and renewals are tried on every endpoint in that time. A write is sent to a second endpoint only when it
        is certain that the first did not get it; otherwise the error says ``maybe_done``.
        """

    def watch(self, key: str, *, prefix: bool, from_revision: int, heard: Heard) -> Watch:
        """Hear of every change of a key (or of all that start with it) from a revision on, across lost connections."""

    def close(self) -> None:
        """Call back no more, and let go of all connections."""
