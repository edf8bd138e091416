"""An agent's registration: its id, its lease, the renewals, and until when its workers may live.

The deadline of the workers counts from when a renewal was *sent*; a vouch of the other members may move it while the
store is out of reach. An id that was registered once is registered again only while the workers run without a break.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .desk import TIMEOUT_S, Desk
from .effects import SetDeadline
from .keys import Keys, new_node_id
from .outbox import RoundSeen
from .records import Kind, NodeRecord, write_node
from .store import (
    Answer,
    Compare,
    GrantLease,
    KeepAlive,
    KeyValue,
    LeaseAlive,
    LeaseGranted,
    Put,
    Range,
    RangeAnswer,
    RevokeLease,
    StoreError,
    Target,
    Txn,
    TxnAnswer,
)

OLD_IDS = 3  # that are remembered: one of them may be a member of the round


class NodeInfo(NamedTuple):
    """What this node is to the others."""

    host: str
    boot_id: str
    address: str  # where it listens for its peers
    local_world_size: int
    role: str = "default"
    node_rank: int | None = None


class Owner(Protocol):
    """What a registration has to ask of the member whose it is, and to tell it."""

    @property
    def runs_unbroken(self) -> bool:
        """Whether workers of the current round live here and have not been stopped."""

    @property
    def round_seen(self) -> RoundSeen:
        """`round` as it was last seen."""

    def see(self, kv: KeyValue | None) -> None:
        """`round`, as it was found on the way."""

    def registered(self) -> None:
        """There is a lease, and an id on it."""

    def renewed(self) -> None:
        """The lease was renewed."""

    def missed(self) -> None:
        """A renewal was missed."""

    def lost(self) -> None:
        """There is no registration, or none any more; and it is time to see about one."""

    def overdue(self) -> None:
        """The deadline has passed."""


class Registration:
    """One agent's registration in its run, through all its ids."""

    def __init__(
        self, desk: Desk, keys: Keys, node: NodeInfo, lease_ttl_s: float, fresh: Callable[[], str], owner: Owner
    ) -> None:
        self.node_id = ""
        self.old_ids: tuple[str, ...] = ()
        self.is_valid = False  # registered, as far as we know
        self.is_under_way = False
        self.lease_deadline = float("-inf")
        self._desk = desk
        self._keys = keys
        self._node = node
        self._ttl_s = lease_ttl_s
        self._fresh = fresh
        self._owner = owner
        self._lease = 0
        self._known_id = ""  # the last id that was registered
        self._vouch_deadline = float("-inf")
        self._told_deadline = float("-inf")

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids of this process that count: the present one first."""
        return (self.node_id, *self.old_ids) if self.node_id else ()

    @property
    def was_ever_valid(self) -> bool:
        """Whether this process has been registered at any time."""
        return bool(self._lease)

    def take_new_id(self, arrival: int) -> None:
        """Register under a new id; the old one stays spent. ``arrival``: a revision of the store, as it is now."""
        if self.node_id:
            self.old_ids = (self.node_id, *self.old_ids)[:OLD_IDS]
        self.node_id = new_node_id(arrival, self._fresh())
        self.register()

    def register(self) -> None:
        """Register under the present id."""
        if self.is_under_way or self.is_valid:
            return
        self.is_under_way = True
        now = self._desk.now
        self._desk.ask(GrantLease(math.ceil(self._ttl_s)), TIMEOUT_S, lambda answer: self._granted(answer, now))

    def give_up(self, then: Callable[[], None]) -> None:
        """End the registration; ``then`` is called when that is done, or cannot be."""
        self.is_valid = False
        self._desk.ask(RevokeLease(self._lease), TIMEOUT_S, lambda _answer: then())

    # --- registering ---------------------------------------------------------------------------------------------

    def _granted(self, answer: Answer | StoreError, sent_at: float) -> None:
        if not isinstance(answer, LeaseGranted):
            self._later()
            return
        node_id, lease, node = self.node_id, answer.lease, self._node
        if self._is_spent(node_id):
            self._drop(lease)
            return
        key = self._keys.node(node_id)
        record = NodeRecord(
            node_id, node.address, node.host, node.boot_id, node.local_world_size, node.role, node.node_rank
        )
        compares = [Compare(key, Target.CREATE_REVISION, 0)]
        if self._owner.runs_unbroken:  # the same id again: only if the round stands as it did
            seen = self._owner.round_seen
            compares.append(Compare(self._keys.round, Target.MOD_REVISION, seen.revision))
            told = self._keys.report(seen.number, node_id, Kind.STOPPED.value)
            compares.append(Compare(told, Target.CREATE_REVISION, 0))  # and they have not stopped meanwhile
        request = Txn(
            tuple(compares),
            (Put(key, write_node(record), lease),),
            (Range(key, keys_only=True), Range(self._keys.round)),
        )
        self._desk.ask(request, TIMEOUT_S, lambda answer: self._sent(answer, node_id, lease, sent_at))

    def _sent(self, answer: Answer | StoreError, node_id: str, lease: int, sent_at: float) -> None:
        if isinstance(answer, TxnAnswer) and answer.succeeded:
            self._is_registered(lease, sent_at)
        elif isinstance(answer, TxnAnswer):
            mine, current = answer.ranges
            self._owner.see(current.kvs[0] if current.kvs else None)
            self._found(bool(mine.kvs and mine.kvs[0].lease == lease), lease, sent_at)
        elif isinstance(answer, StoreError) and answer.maybe_done:
            request = Range(self._keys.node(node_id), keys_only=True)
            self._desk.ask(request, TIMEOUT_S, lambda found: self._looked_up(found, lease, sent_at))
        else:
            self._later()

    def _looked_up(self, answer: Answer | StoreError, lease: int, sent_at: float) -> None:
        there = isinstance(answer, RangeAnswer) and bool(answer.kvs) and answer.kvs[0].lease == lease
        self._found(there, lease, sent_at)

    def _found(self, there: bool, lease: int, sent_at: float) -> None:
        if there:
            self._is_registered(lease, sent_at)
        else:
            self._later()

    def _later(self) -> None:
        self.is_under_way = False
        self._desk.retry("register", self._owner.lost)

    def _is_spent(self, node_id: str) -> bool:
        """Whether an id was registered before, and its workers have not run without a break since."""
        return node_id == self._known_id and not self._owner.runs_unbroken

    def _drop(self, lease: int) -> None:
        self.is_under_way = False
        self._desk.ask(RevokeLease(lease), TIMEOUT_S, lambda _answer: None)
        self._owner.lost()

    def _is_registered(self, lease: int, sent_at: float) -> None:
        if self._is_spent(self.node_id):  # its workers stopped while the answer was under way
            self._drop(lease)
            return
        self.is_under_way = False
        self.is_valid = True
        self._known_id = self.node_id
        self._lease = lease
        self._extend(sent_at)
        self._desk.set_timer("renew", sent_at + self._ttl_s / 3, self._renew)
        self._owner.registered()

    # --- renewing ------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        if not self.is_valid and not self._owner.runs_unbroken:
            return
        now, lease = self._desk.now, self._lease
        self._desk.set_timer("renew", now + self._ttl_s / 3, self._renew)
        if not self.is_valid:  # to register again may take an etcd that has just come back longer than a vouch lasts
            self._owner.missed()
            return
        self._desk.ask(KeepAlive(lease), self._ttl_s / 4, lambda answer: self._answered(answer, lease, now))

    def _answered(self, answer: Answer | StoreError, lease: int, sent_at: float) -> None:
        if lease != self._lease or not self.is_valid:
            return
        if isinstance(answer, LeaseAlive) and answer.ttl_s > 0:
            self._extend(sent_at)
            self._owner.renewed()
        elif isinstance(answer, LeaseAlive):
            self.is_valid = False
            self._owner.lost()
        else:
            self._owner.missed()

    # --- the deadline --------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When this node's workers must be dead, unless it is moved before."""
        return max(self.lease_deadline, self._vouch_deadline)

    def vouched(self, until: float) -> None:
        """The others let our workers live until then."""
        if until > self._vouch_deadline:
            self._vouch_deadline = until
            self._tell()

    def forget_vouch(self) -> None:
        """A vouch is for one round: from here on only the lease counts."""
        self._vouch_deadline = self._told_deadline = float("-inf")
        self._tell()

    def _extend(self, sent_at: float) -> None:
        self.lease_deadline = max(self.lease_deadline, sent_at + self._ttl_s)
        self._tell()

    def _tell(self) -> None:
        if self.deadline > self._told_deadline:
            self._told_deadline = self.deadline
            self._desk.emit(SetDeadline(self.deadline))
            self._desk.set_timer("deadline", self.deadline, self._owner.overdue)
