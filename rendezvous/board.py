"""A copy of all keys of a run, as a proposer keeps it: listed at a revision, brought forward by a watch."""

from __future__ import annotations

from collections.abc import Iterable

from .keys import Keys
from .records import (
    AssignRecord,
    Kind,
    Malformed,
    NodeRecord,
    ReportRecord,
    RoundRecord,
    read_assign,
    read_node,
    read_report,
    read_round,
)
from .store import Change, KeyValue

_KINDS = frozenset(kind.value for kind in Kind)


class Board:
    """What stands under a run's keys. What cannot be read is left out, and named in ``complaints``."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.round: RoundRecord | None = None
        self.round_revision = 0
        self.nodes: dict[str, NodeRecord] = {}
        self.leases: dict[str, int] = {}  # of registrations
        self.reports: dict[int, dict[str, dict[Kind, ReportRecord]]] = {}  # by round and node
        self.assigns: dict[str, dict[str, AssignRecord]] = {}  # by nonce and node
        self.away: set[str] = set()  # keys of hosts
        self.stop_wish: str | None = None
        self.complaints: list[str] = []

    def load(self, kvs: Iterable[KeyValue]) -> None:
        """Start from a list of all keys."""
        complaints = self.complaints
        self.__init__(self._keys)  # type: ignore[misc]  # anew, as a whole
        self.complaints = complaints
        for kv in kvs:
            self._put(*kv)

    def load_reports(self, number: int, kvs: Iterable[KeyValue]) -> None:
        """Replace what is known of one round's reports by a list of them."""
        self.reports.pop(number, None)
        for kv in kvs:
            self._put(*kv)

    def apply(self, change: Change) -> None:
        """Bring forward by one change."""
        if change.value is None:
            self._delete(change.key)
        else:
            self._put(change.key, change.value, change.create_revision, change.mod_revision, change.lease)

    def members(self) -> dict[str, AssignRecord] | None:
        """The members of the round that runs or stops; None where they are not all known."""
        if self.round is None:
            return None
        found = self.assigns.get(self.round.nonce, {}) if self.round.nonce else {}
        if self.round.nonce and (not found or len(found) < next(iter(found.values())).group_world_size):
            return None
        return found

    def _put(self, key: str, value: bytes, created: int, modified: int, lease: int) -> None:
        keys = self._keys
        try:
            if key == keys.round:
                self.round, self.round_revision = read_round(key, value), modified
            elif key.startswith(keys.nodes):
                if node_id := keys.node_of(key):
                    self.nodes[node_id], self.leases[node_id] = read_node(key, value), lease
            elif keys.reported(key):
                report = read_report(key, value, created)
                self.reports.setdefault(report.number, {}).setdefault(report.node_id, {})[report.kind] = report
            elif assigned := keys.assigned(key):
                nonce, node_id = assigned
                self.assigns.setdefault(nonce, {})[node_id] = read_assign(key, value)
            elif key.startswith(keys.away):
                self.away.add(key)
            elif key == keys.stop:
                self.stop_wish = value.decode(errors="replace")[:200] or "stopped by a user"
        except Malformed as problem:
            self.complaints.append(str(problem))

    def _delete(self, key: str) -> None:
        keys = self._keys
        if node_id := keys.node_of(key):
            self.nodes.pop(node_id, None)
        elif reported := keys.reported(key):
            number, node_id, kind = reported
            if kind in _KINDS:
                self.reports.get(number, {}).get(node_id, {}).pop(Kind(kind), None)
        elif assigned := keys.assigned(key):
            nonce, node_id = assigned
            self.assigns.get(nonce, {}).pop(node_id, None)
        elif key.startswith(keys.away):
            self.away.discard(key)
        elif key == keys.stop:
            self.stop_wish = None
        elif key == keys.round:
            self.round = None
