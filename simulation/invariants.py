"""What must hold at every step, whatever goes wrong: the invariants of docs/protocol.md, watched from outside.

Nothing here asks the agents what they think: workers are counted where they run, decisions are read where they stand.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dlaunch.outcome import RunState
from dlaunch.rendezvous.keys import Keys
from dlaunch.rendezvous.records import (
    AssignRecord,
    Kind,
    Malformed,
    NodeRecord,
    Phase,
    ReportRecord,
    RoundRecord,
    read_assign,
    read_node,
    read_report,
    read_round,
)
from dlaunch.rendezvous.store import Change

if TYPE_CHECKING:
    from .etcd import Client
    from .node import Agent
    from .starter import Worker

LAPSE = "renewed its lease no more"  # in the reason of a round that stops because of a lapsed lease


class Violation(Exception):
    """Something that must never be."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(f"{rule}: {sentence}")
        self.rule = rule


class Invariants:
    """Looks at workers and at the store's decisions, and raises Violation."""

    def __init__(self, keys: Keys, promise_s: float) -> None:
        self.round: RoundRecord | None = None
        self.members: dict[str, AssignRecord] = {}  # of the last round that ran
        self.closed: RoundRecord | None = None
        self.registered: set[str] = set()  # node ids
        self.rounds = 0
        self.stops: list[str] = []  # why rounds were stopped
        self.is_restored = False  # from a snapshot: what no store can cure is not asked for
        self._keys = keys
        self._promise_s = promise_s
        self._assigns: dict[str, dict[str, AssignRecord]] = defaultdict(dict)  # by nonce and node
        self._reports: dict[str, list[ReportRecord]] = defaultdict(list)  # of this round, by node
        self._owners: dict[str, Client | None] = {}  # of every node id that ever was
        self._nodes: dict[str, NodeRecord] = {}  # of every node id that ever was
        self._agents: dict[str, Agent] = {}  # by node id
        self._alive: dict[int, set[Worker]] = defaultdict(set)  # by round
        self._started: set[tuple[str, int, int]] = set()  # node id, round, local rank
        self._ranks: dict[int, dict[int, Worker]] = defaultdict(dict)  # who had which rank, by round
        self._has_lapsed = False  # whether the lease of a member has run out in this round
        self._proven: set[tuple[str, str]] = set()  # who has seen in a list, under no promise, that whose lease is gone
        self._promises: dict[tuple[str, int], float] = {}  # by node id and round: until when, on its host's clock

    # --- workers -------------------------------------------------------------------------------------------------

    def worker_started(self, worker: Worker) -> None:
        """A worker runs."""
        starter, assignment = worker.starter, worker.assignment
        number, node_id = assignment.round, worker.node_id
        who = f"{starter.host.name} rank {worker.rank} of round {number}"
        place = (node_id, number, worker.local_rank)
        if place in self._started:
            raise Violation("no restart within a round", f"{who} was started twice")
        self._started.add(place)
        if starter.deadline == float("inf"):
            raise Violation("deadline", f"{who} started, and its starter knows no deadline")
        if (other := self._ranks[number].get(worker.rank)) and not self.is_restored:
            raise Violation("1 ranks", f"{who} started; {other.starter.host.name} has that rank too")
        self._ranks[number][worker.rank] = worker
        self._compare_with_record(worker, node_id)
        self._alive[number].add(worker)
        self.check_worlds()

    def _compare_with_record(self, worker: Worker, node_id: str) -> None:
        """What a worker is told is what was decided."""
        told, number = worker.assignment, worker.assignment.round
        if self.is_restored or self.round is None or self.round.number != number:
            return  # late: it is for the other rules to say whether too late
        record = self.members.get(node_id)
        if record is None:
            raise Violation("1 ranks", f"{node_id} starts a worker of round {number} and is no member of it")
        decided = (record.group_rank, record.group_world_size, record.base_rank, record.world_size)
        if decided != (told.group_rank, told.group_world_size, told.base_rank, told.world_size):
            raise Violation("1 ranks", f"{node_id} was given {told}, decided was {record}")
        if told.restart_count != self.round.restarts:
            raise Violation("3 restarts", f"{node_id} is told of {told.restart_count} restarts: {self.round.restarts}")

    def worker_ended(self, worker: Worker) -> None:
        """A worker is gone."""
        self._alive[worker.assignment.round].discard(worker)

    def check_worlds(self) -> None:
        """No two rounds at once, hosts that are frozen as a whole excepted, and the moment in which they wake late."""
        running = {number: workers for number, workers in self._alive.items() if any(map(_counts, workers))}
        if len(running) > 1 and not self.is_restored:
            told = "; ".join(
                f"round {number} on {', '.join(sorted({w.starter.host.name for w in workers if _counts(w)}))}"
                for number, workers in sorted(running.items())
            )
            raise Violation("2 one world at a time", told)

    def alive(self, number: int | None = None) -> set[Worker]:
        """The workers that run, of a round or at all."""
        if number is not None:
            return self._alive[number]
        return set().union(*self._alive.values())

    # --- agents --------------------------------------------------------------------------------------------------

    def node_named(self, agent: Agent, before: str) -> None:
        """An agent has a node id, or a new one."""
        if (other := self._agents.get(agent.node_id)) is not None and other is not agent:
            raise Violation("10 node ids", f"{agent.name} and {other.name} are both node {agent.node_id}")
        self._agents[agent.node_id] = agent
        if before and agent.starter is not None and agent.starter.workers:
            raise Violation("10 node ids", f"{agent.name} takes a new node id while its workers live")

    def gone_heard(self, by: Agent, node_id: str) -> None:
        """Somebody is told that a node is gone, and all that it had started."""
        for worker in self.alive():
            agent = worker.starter.agent
            if worker.node_id == node_id and _counts(worker):
                raise Violation("proofs", f"{by.name} hears that {agent.name} is gone, and {worker.rank} lives")

    def promised(self, agent: Agent, message: dict[str, Any]) -> None:
        """An agent gives a promise: it takes no lapsed lease of this round for a proof for so long."""
        self._promises[agent.node_id, message["round"]] = agent.host.shows() + self._promise_s

    def listed(self, agent: Agent, asked_at: float, registered: set[str]) -> None:
        """An agent has a list of all registrations; ``asked_at`` on its host's clock.

        It proves that members without a lease are gone where no promise ran at any time between question and answer.
        """
        if self.round is None:
            return
        until = self._promises.get((agent.node_id, self.round.number), 0.0)
        if until <= asked_at:
            self._proven |= {(agent.node_id, member) for member in self.members if member not in registered}

    def proposes(self, agent: Agent, data: bytes) -> None:
        """An agent asks the store to change the round: it must not break its promise."""
        try:
            record = read_round(self._keys.round, data)
        except Malformed:
            return
        if record.phase is not Phase.STOPPING or LAPSE not in record.reason:
            return
        until = self._promises.get((agent.node_id, record.number), 0.0)
        lapsed = {member for member in self.members if member not in self.registered}
        known = any((agent.node_id, member) in self._proven for member in lapsed)
        if agent.host.shows() < until and lapsed < set(self.members) and not known:
            raise Violation("promises", f"{agent.name} takes a lapsed lease for a proof under its promise")

    # --- the store -----------------------------------------------------------------------------------------------

    def written(self, client: Client | None, changes: tuple[Change, ...]) -> None:
        """One revision of the store."""
        keys = self._keys
        for change in changes:
            if change.key.startswith(keys.every_report):
                self._see_report(change)
            elif change.key.startswith(keys.nodes):
                self._see_node(client, change)
            elif change.key.startswith(keys.root + "assign/") and change.value is not None:
                nonce = change.key.split("/")[-2]
                record = read_assign(change.key, change.value)
                self._assigns[nonce][record.node_id] = record
        for change in changes:
            if change.key == keys.round and change.value is not None:
                self._see_round(read_round(change.key, change.value))

    def written_by_people(self, changes: tuple[Change, ...]) -> None:
        """What no agent wrote: it counts only where a registration is gone."""
        for change in changes:
            if change.value is None and change.key.startswith(self._keys.nodes):
                self._see_node(None, change)

    def _see_report(self, change: Change) -> None:
        if change.value is None:
            return
        report = read_report(change.key, change.value, change.create_revision)
        if self.round is None or report.number != self.round.number:
            raise Violation("guard on reports", f"{change.key} is written in round {self.round and self.round.number}")
        self._reports[report.node_id].append(report)
        if report.kind in {Kind.STOPPED, Kind.FENCED, Kind.FINISHED}:
            for worker in self._alive[report.number]:
                if worker.node_id == report.node_id and _counts(worker):
                    raise Violation("proofs", f"{change.key} is written, and rank {worker.rank} of it lives")

    def _see_node(self, client: Client | None, change: Change) -> None:
        node_id = change.key.rpartition("/")[2]
        if change.value is None:
            self.registered.discard(node_id)
            self._has_lapsed = self._has_lapsed or node_id in self.members
            return
        self._nodes[node_id] = read_node(change.key, change.value)
        again = node_id not in self.registered and node_id in self._owners
        self.registered.add(node_id)
        if self._owners.setdefault(node_id, client) is not client:
            raise Violation("10 node ids", f"{node_id} is registered by two agents")
        if again and not self.is_restored:
            # it was sent while its workers ran; they may have ended while it was on its way, but nobody may have told
            told = any(report.kind in {Kind.STOPPED, Kind.FENCED} for report in self._reports[node_id])
            if told or node_id not in self.members:
                raise Violation("10 node ids", f"{node_id} is registered again, and it is known to have stopped")

    def _see_round(self, record: RoundRecord) -> None:
        before, self.round = self.round, record
        if before is not None and not self.is_restored:
            self._check_step(before, record)
        if before is None or record.number != before.number:
            self.rounds += 1
            if before is not None:
                self._check_barrier(before)
                if not self.is_restored:
                    self._check_restarts(before, record)
            self._reports.clear()
            self._proven.clear()
            self._has_lapsed = False
            self.members = {}
        if record.phase is Phase.RUNNING:
            self.members = self._assigns[record.nonce]
            self._check_membership(record)
        if record.phase is Phase.STOPPING:
            self.stops.append(record.reason)
            self._check_lapse(record)
        if record.phase is Phase.CLOSED:
            self.closed = record
            self._check_closed(record)

    def _check_lapse(self, record: RoundRecord) -> None:
        """Whoever is said to be lost because of its lease has no worker that lives."""
        if LAPSE not in record.reason:
            return
        named = {member for member, assign in self.members.items() if f"node {assign.host} " in record.reason}
        lost = named - self.registered or named  # of several agents on one host, one of those that have no lease
        alive = {worker.node_id: worker for worker in self._alive[record.number] if _counts(worker)}
        if lost and lost <= alive.keys():
            worker = alive[min(lost)]
            name = worker.starter.host.name
            raise Violation("promises", f"{name} is said to be lost by its lease, and its rank {worker.rank} lives")

    def _check_step(self, before: RoundRecord, record: RoundRecord) -> None:
        one = (before.number, before.phase.order)
        steps = {(before.number, before.phase.order + 1), (before.number, Phase.CLOSED.order), (before.number + 1, 0)}
        if before.phase is Phase.CLOSED or (record.number, record.phase.order) not in steps:
            raise Violation("1 round numbers", f"{one} is followed by {record.number} {record.phase.value}")
        if record.number > before.number and before.phase is not Phase.STOPPING:
            raise Violation("1 round numbers", f"round {before.number} is {before.phase.value}, and the next one forms")

    def _check_barrier(self, before: RoundRecord) -> None:
        left = [worker for worker in self._alive[before.number] if _counts(worker)]
        if left and not self.is_restored:
            where = ", ".join(sorted({worker.starter.host.name for worker in left}))
            raise Violation("2 barrier", f"round {before.number + 1} forms while workers of the last live on {where}")

    def _check_restarts(self, before: RoundRecord, record: RoundRecord) -> None:
        cost = record.restarts - before.restarts
        reports = [report for of_node in self._reports.values() for report in of_node]
        kinds = {report.kind for report in reports}
        failed = Kind.FAILED in kinds
        news = [report for report in reports if report.kind not in {Kind.READY, Kind.FINISHED}]
        first = min(news, key=lambda report: report.revision, default=None)
        if cost not in {0, 1} or (cost and not failed):
            raise Violation(
                "3 restarts", f"from {before.restarts} to {record.restarts}, by {sorted(k.value for k in kinds)}"
            )
        clean = not kinds & {Kind.LOST, Kind.LEAVING, Kind.FENCED} and not self._has_lapsed
        if (
            first
            and first.kind is Kind.FAILED
            and clean
            and not cost
            and all(self._stopped(member) for member in self.members)
        ):
            raise Violation("3 restarts", f"the failure in round {before.number} was not counted")

    def _stopped(self, member: str) -> bool:
        return any(report.kind in {Kind.STOPPED, Kind.FINISHED} for report in self._reports[member])

    def _check_membership(self, record: RoundRecord) -> None:
        members = sorted(self.members.values(), key=lambda member: member.group_rank)
        base = 0
        for group_rank, member in enumerate(members):
            if member.group_rank != group_rank or member.base_rank != base:
                raise Violation("1 ranks", f"round {record.number}: {member}")
            base += member.local_world_size
        worlds = {(member.world_size, member.group_world_size) for member in members}
        if worlds != {(base, len(members))}:
            raise Violation("1 ranks", f"round {record.number}: {worlds} for {base} workers on {len(members)} nodes")
        self._check_roles(record, members)
        self._check_wishes(record, members)

    def _check_roles(self, record: RoundRecord, members: list[AssignRecord]) -> None:
        """Ranks within a role are contiguous too, in the order of the ranks."""
        base: dict[str, int] = defaultdict(int)
        for member in members:
            role = self._nodes[member.node_id].role
            if member.role_base_rank != base[role]:
                raise Violation("1 ranks", f"round {record.number}: {member.node_id} begins at {base[role]} of {role}")
            base[role] += member.local_world_size
        for member in members:
            if member.role_world_size != base[self._nodes[member.node_id].role]:
                raise Violation("1 ranks", f"round {record.number}: {member.node_id} has a wrong world of its role")

    def _check_wishes(self, record: RoundRecord, members: list[AssignRecord]) -> None:
        """Of those that wish for a group rank, the one that came first has it."""
        for member in sorted(members, key=lambda member: member.node_id, reverse=True):
            wish = self._nodes[member.node_id].node_rank
            if wish is None or wish >= len(members):
                continue
            there = self._nodes[members[wish].node_id]
            if there.node_rank != wish or there.node_id > member.node_id:
                raise Violation("1 ranks", f"{there.node_id} has the rank {wish} that {member.node_id} wishes for")

    def _check_closed(self, record: RoundRecord) -> None:
        ending = record.ending
        left = [worker for worker in self._alive[record.number] if _counts(worker)]
        if ending is None or (left and not self.is_restored):
            raise Violation("6 the end", f"closed with {len(left)} workers alive")
        if ending.state is RunState.SUCCEEDED:
            if not self.members or not all(self._has(member, Kind.FINISHED) for member in self.members):
                raise Violation("6 the end", "succeeded, and not every member has finished")
        elif ending.failure is not None:
            self._check_cause(record)

    def _has(self, member: str, kind: Kind) -> bool:
        return any(report.kind is kind for report in self._reports[member])

    def _check_cause(self, record: RoundRecord) -> None:
        """The root cause is the failure with the smallest revision."""
        failed = [report for of_node in self._reports.values() for report in of_node if report.kind is Kind.FAILED]
        first = min(failed, key=lambda report: report.revision, default=None)
        told = record.ending and record.ending.failure
        if first is None or told is None or first.failure is None:
            raise Violation("4 root cause", f"{told} was told, and no failure reported")
        if first.failure.node != told.node:
            raise Violation("4 root cause", f"{told.node} rank {told.rank} is blamed; first was {first.node_id}")


def _counts(worker: Worker) -> bool:
    """Whether a worker runs in the sense of the invariants."""
    return not worker.excused and not worker.starter.host.is_frozen
