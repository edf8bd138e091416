"""Whose leases have lapsed, as one proposer finds out: lists of the registrations, and a look at single leases.

A registration that is absent from a list may have lapsed, been given up, or been deleted by hand while its lease goes
on; and some versions of etcd end leases before their time. What is a proof is for proofs.py to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .board import Board
from .desk import TIMEOUT_S, Desk
from .keys import Keys
from .proofs import Proofs
from .records import Kind, Phase, RunSettings
from .store import (
    Answer,
    CountMembers,
    GetVersion,
    LeaseAlive,
    LookAtLease,
    MemberCount,
    Range,
    RangeAnswer,
    ServerVersion,
    StoreError,
)


class Standing(NamedTuple):
    """What has to be known of the proposer's own agent, each time."""

    ids: tuple[str, ...]  # its own: the present, and old ones under which it may be a member
    promised_until: float


def checks_leader_before_revoking(version: str) -> bool:
    """Whether an etcd of this version lets no deposed leader end leases that were renewed elsewhere.

    Source: etcd issue 15247; changelogs of 3.4 (3.4.31), 3.5 (3.5.13) and 3.6.
    """
    numbers = tuple(int(part) for part in version.partition("-")[0].split(".") if part.isdecimal())
    return numbers >= (3, 6) or (3, 5, 13) <= numbers < (3, 6) or (3, 4, 31) <= numbers < (3, 5)


class Lapses:
    """The lists of one proposer, and what they prove of the members of the present round."""

    def __init__(
        self,
        desk: Desk,
        keys: Keys,
        settings: RunSettings,
        board: Board,
        standing: Callable[[], Standing],
        listed: Callable[[set[str]], None],
    ) -> None:
        """``listed`` gets the ids that are registered, after each list."""
        self.proofs = Proofs(settings.lease_ttl_s, settings.outage_limit_s)
        self.every_s = min(TIMEOUT_S, settings.lease_ttl_s * 0.4)
        self._desk = desk
        self._keys = keys
        self._ttl_s = settings.lease_ttl_s
        self._board = board
        self._standing = standing
        self._listed = listed
        self._is_single = self._is_new = False  # the store, as far as we know
        self._leases: dict[str, int] = {}  # of all registrations that were ever seen
        self._lapsed: dict[str, float] = {}  # ids whose leases were looked at, and are gone: since when we know

    def know_store(self) -> None:
        """Ask whether this store can end a lease before its time: several members, and one too old to know better."""
        self._desk.ask(CountMembers(), TIMEOUT_S, self._members_counted)
        self._desk.ask(GetVersion(), TIMEOUT_S, self._version_told)

    def enter(self, number: int) -> None:
        """Bring the proofs to a round, with what its reports say of members that ended."""
        self.proofs.enter(number)
        mine, members = self._standing().ids, self._board.members() or {}
        for node_id, reports in self._board.reports.get(number, {}).items():
            if node_id in members and node_id not in mine and reports.keys() & {Kind.STOPPED, Kind.FENCED, Kind.LOST}:
                self.proofs.member_ended(self._desk.now)

    def list(self) -> None:
        """List the registrations."""
        now = self._desk.now
        number = self._board.round.number if self._board.round else 0
        request = Range(self._keys.nodes, prefix=True, keys_only=True)
        self._desk.ask(request, self.every_s, lambda answer: self._has_listed(answer, now, number))

    def _has_listed(self, answer: Answer | StoreError, asked_at: float, number: int) -> None:
        if not isinstance(answer, RangeAnswer):
            return
        registered = {node_id for kv in answer.kvs if (node_id := self._keys.node_of(kv.key))}
        self._prove(registered, asked_at, number)
        self._listed(registered)

    def _prove(self, registered: set[str], asked_at: float, number: int) -> None:
        record, members = self._board.round, self._board.members()
        if record is None or not members or record.number != number:
            return
        if record.phase not in {Phase.RUNNING, Phase.STOPPING}:
            return
        self.enter(number)
        self._know_leases()
        ids, promised_until = self._standing()  # a promise that was given since the list was asked for counts too
        absent = [member for member in members if member not in registered]
        for member in absent:
            self._look_at_lease(member)
        self.proofs.listed(
            members,
            registered,
            me=next((node_id for node_id in ids if node_id in members), None),
            asked_at=asked_at,
            answered_at=self._desk.now,
            promised_until=promised_until,
            doubts_s={member: self._doubt_s(member, asked_at) for member in absent},
        )

    def _doubt_s(self, member: str, now: float) -> float:
        """For how long a lease has to be absent until it counts; for ever, while it is not known to be gone."""
        if member not in self._leases:
            return self._ttl_s  # it went before we looked here: it cannot be asked for
        if member not in self._lapsed:
            return math.inf
        is_sound = self._is_single or self._is_new
        return 0.0 if is_sound or now - self._lapsed[member] >= self._ttl_s else math.inf

    def _know_leases(self) -> None:
        """A node that registers again has another lease, of which nothing is known yet."""
        for node_id, lease in self._board.leases.items():
            if self._leases.get(node_id) != lease:
                self._leases[node_id] = lease
                self._lapsed.pop(node_id, None)

    def _look_at_lease(self, member: str) -> None:
        """Only a lease that is gone has lapsed: its key alone may have been deleted by hand."""
        if member not in self._lapsed and (lease := self._leases.get(member)):
            self._desk.ask(LookAtLease(lease), TIMEOUT_S, lambda answer: self._looked_at(member, lease, answer))

    def _looked_at(self, member: str, lease: int, answer: Answer | StoreError) -> None:
        is_gone = isinstance(answer, LeaseAlive) and answer.ttl_s == 0
        if is_gone and self._leases.get(member) == lease and member not in self._lapsed:
            self._lapsed[member] = self._desk.now
            self.list()

    def _members_counted(self, answer: Answer | StoreError) -> None:
        self._is_single = isinstance(answer, MemberCount) and answer.members == 1

    def _version_told(self, answer: Answer | StoreError) -> None:
        self._is_new = isinstance(answer, ServerVersion) and checks_leader_before_revoking(answer.version)
