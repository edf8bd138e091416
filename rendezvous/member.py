"""One agent's part in a run of several nodes: a pure machine that takes an event and the time, and returns effects.

It does no I/O and reads no clock. It follows `round`, has its node start and stop workers as the rounds say, reports
what becomes of them, and proposes when its turn comes. The rules, and why each is needed, are in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dlaunch.errors import DlaunchError, StoreUnreachable
from dlaunch.outcome import Failure

from .desk import RETRY_S, TIMEOUT_S, Desk
from .effects import Effect, EndRun, FollowPeer, Left, OpenMeeting, Refuse, RunRound, Say, SendPeer, SetToken, StopRound
from .events import (
    Answered,
    Event,
    Join,
    Leave,
    Leaving,
    MeetingOpened,
    PeerGone,
    PeerSaid,
    TimerFired,
    WatchHeard,
    WorkersFailed,
    WorkersFinished,
    WorkersStopped,
)
from .joining import Joining, not_ours
from .keys import Keys, is_node_id
from .lapses import Standing
from .outbox import Outbox, RoundSeen
from .placing import as_assignment
from .proposer import PROPOSERS, Proposer
from .records import (
    AssignRecord,
    Kind,
    Malformed,
    Phase,
    ReportRecord,
    RoundRecord,
    RunSettings,
    SpecRecord,
    read_assign,
    read_round,
)
from .registration import NodeInfo, Registration
from .store import Answer, Changes, KeyValue, Range, RangeAnswer, StoreError, Trouble, Txn, TxnAnswer, WatchLost
from .vouching import ToPeer, Vouching

__all__ = ["Member", "MemberSettings", "NodeInfo"]

LOOK_S = 2.0  # how often every agent looks whether it has to propose
FIRST_NODES = 16  # registrations that a look shows, the oldest first: the elders are among them
FENCE_S = 0.1  # from a peer's refusal to the proof: workers that lost every parent at once are being killed
SPARE_S = 2.0  # a node that is not taken in by then is told so
LEAVE_S = 3.0  # how long a leave may take to be written
LINGER_S = 10.0  # how long the host of a private etcd serves the others after the end


class MemberSettings(NamedTuple):
    """What a member needs to know of the job."""

    run_id: str
    run: RunSettings
    key_prefix: str = "/dlaunch"
    timeout_s: float = 600.0  # how long a round may form
    connect_s: float = 15.0  # how long the store may be out of reach at first
    lingers: bool = False  # whether the store lives and dies with this node


class Member:
    """One agent process in one run."""

    def __init__(self, settings: MemberSettings, node: NodeInfo, fresh: Callable[[], str]) -> None:
        """``fresh`` returns a new random text at each call: for ids and the run's secret."""
        self._settings = settings
        self._node = node
        self._fresh = fresh
        self._run = run = settings.run
        self._keys = keys = Keys.of(settings.key_prefix, settings.run_id)
        self._desk = desk = Desk()
        self._joining = Joining(
            desk, keys, settings.run_id, run, settings.connect_s, fresh, self._has_joined, self._refuse
        )
        self._registration = Registration(desk, keys, node, run.lease_ttl_s, fresh, self)
        self._outbox = Outbox(desk, keys, lambda: self.round_seen, self.see, self._trouble)
        self._vouching = Vouching(run.lease_ttl_s)
        self._spec: SpecRecord | None = None
        self._proposer: Proposer | None = None
        self._began_at = 0.0
        # the round
        self._round: RoundRecord | None = None
        self._round_revision = 0
        self._watch: int | None = None
        self._assigns: dict[str, AssignRecord | None] = {}  # by nonce: the only one that counts now
        self._assign_asked: str | None = None  # the nonce for which it was asked last, unless that failed
        self._gone: set[str] = set()  # members of this round that we found gone
        # this node's workers
        self._running = 0  # the round of the workers that live here; 0: none
        self._stopping = False  # they are being stopped
        self._told_to_stop = 0  # the last round whose workers we had stopped because of `round`
        self._dead = 0  # the highest round whose workers stopped here
        self._finished = 0
        self._in_trouble = 0  # the round in which a worker of ours failed
        self._spare_in = 0  # the last round that was seen to run without us
        self._passed_in = -1  # the last round that ran without us because we were not ready in time
        self._passed_twice = False  # so did the round before
        self._meeting_for: tuple[int, str] | None = None
        # ends
        self._leaving = ""
        self._leave_asked = False
        self._ends = False
        self._refused = False
        self._over = False
        self._said: set[str] = set()

    @property
    def node_id(self) -> str:
        """Our present id; empty before there is one."""
        return self._registration.node_id

    def handle(self, event: Event, now: float) -> list[Effect]:  # noqa: PLR0912  -- one case for each event
        """What to do about ``event``."""
        self._desk.now = now
        if self._over:  # what it waits for, when it was to leave as the run ended, is to hear that it has left
            return [Left()] if isinstance(event, Leave) else []
        match event:
            case Join():
                self._began_at = now
                self._joining.begin()
            case Answered():
                self._desk.answered(event)
            case WatchHeard():
                self._desk.heard(event)
            case TimerFired():
                self._desk.fired(event)
            case PeerSaid(node_id, message):
                self._peer_said(node_id, message)
            case PeerGone(node_id):
                self._peer_gone(node_id)
            case MeetingOpened():
                self._meeting_opened(event)
            case WorkersFailed(number, failure):
                self._workers_failed(number, failure)
            case WorkersStopped(number, failure):
                self._workers_stopped(number, failure)
            case WorkersFinished(number):
                self._workers_finished(number)
            case Leaving(reason):
                self._begin_to_leave(reason)
            case Leave(reason):
                self._leave(reason)
        if self._desk.went_back and not self._over:
            self._store_went_back(*self._desk.went_back)
        return self._desk.take_effects()

    def _has_joined(self, spec: SpecRecord, current: KeyValue | None, revision: int) -> None:
        self._spec = spec
        self._run = spec.settings
        self._proposer = Proposer(
            self._desk,
            self._keys,
            self._run,
            spec.lease,
            self._settings.timeout_s,
            self._fresh,
            self.see,
            lambda: Standing(self._registration.ids, self._vouching.promised_until),
            self._trouble,
            self._refuse,
        )
        self._watch_round(revision + 1)
        self.see(current)
        if not self._over:
            self._outbox.open(spec.lease)
            self._registration.take_new_id(revision)

    # --- what the registration asks and tells --------------------------------------------------------------------

    @property
    def runs_unbroken(self) -> bool:
        """Whether workers of the current round live here and have not been stopped."""
        return self._running != 0 and not self._stopping

    @property
    def round_seen(self) -> RoundSeen:
        """`round` as it was last seen."""
        return RoundSeen(self._round.number if self._round else 0, self._round_revision)

    def registered(self) -> None:
        """There is a lease, and our id on it."""
        assert self._spec
        self._desk.emit(SetToken(self._spec.token, self.node_id))
        if self._leave_asked or self._leaving:
            self._finish_leaving()
            return
        self._desk.set_timer("look", self._desk.now + LOOK_S, self._look)
        self._find_turn()
        self._follow_round()

    def renewed(self) -> None:
        """What waited for a valid lease can go on."""
        self._follow_round()

    def missed(self) -> None:
        """The store did not answer a renewal: the other members may vouch for us."""
        self._ask_for_vouch()
        self._check_outage()

    def lost(self) -> None:
        """Come back: under the old id only while the workers have run without a break, else under a new one."""
        registration = self._registration
        if registration.is_valid or registration.is_under_way or self._leaving or self._over or self._round is None:
            return
        if self._running:
            if self.runs_unbroken:
                registration.register()
            return  # those that are being stopped: when they are gone
        assign = self._my_assign()
        if assign and assign.node_id == self.node_id and self._finished != self._round.number:
            self._dead = max(self._dead, self._round.number)
            self._report(Kind.STOPPED, self.node_id)
        if self._outbox.is_empty:
            self._desk.ask(Range(self._keys.round), TIMEOUT_S, self._come_back)
        else:  # what happened under the old id is told first: its peers may take its end for a loss
            self._desk.retry("register", self.lost)

    def _come_back(self, answer: Answer | StoreError) -> None:
        registration = self._registration
        if registration.is_valid or registration.is_under_way or self._running or self._leaving or self._over:
            return
        if isinstance(answer, RangeAnswer):
            registration.take_new_id(answer.revision)
        else:
            self._desk.retry("register", self.lost)
            self._check_outage()

    def overdue(self) -> None:
        """The deadline has passed."""
        if self._running:
            self._stopping = True
            reason = "this node's lease had run out and nobody could vouch for it"
            self._desk.emit(StopRound(self._running, reason, by_deadline=True))

    def _check_outage(self) -> None:
        """Too long without a store, and without workers: there is nothing left to wait for."""
        since = self._desk.answered_at if self._desk.answered_at is not None else self._began_at
        away_s = self._desk.now - since
        if not self._running and away_s > self._run.outage_limit_s + self._settings.timeout_s:
            self._refuse(StoreUnreachable(f"The store was out of reach for {away_s:.0f} s.", "See --outage-limit."))

    # --- peers ---------------------------------------------------------------------------------------------------

    def _ask_for_vouch(self) -> None:
        record, assign = self._round, self._my_assign()
        if not self.runs_unbroken or record is None or assign is None:
            return
        if record.phase is Phase.RUNNING and record.number == self._running:
            self._send([ToPeer(assign.first.node_id, self._vouching.ask(self._desk.now))], assign)

    def _peer_said(self, sender: str, message: dict[str, object]) -> None:
        record, assign = self._round, self._my_assign()
        if record is None or assign is None or message.get("round") != record.number:
            return
        is_first = assign.group_rank == 0 and assign.node_id == self.node_id
        match message.get("kind"):
            case "vouch_me" if is_first and self._simply_runs():
                self._send(self._vouching.heard_wish(sender, message, self._desk.now), assign)
            case "promise_me" if sender == assign.first.node_id and self._simply_runs():
                if answer := self._vouching.promise(message, self._desk.now):
                    self._send([ToPeer(sender, answer)], assign)
            case "promise" if is_first:
                self._send(self._vouching.heard_promise(sender, message, self._desk.now), assign)
            case "vouch" if sender == assign.first.node_id and self._running == record.number:
                self._vouched(message)

    def _vouched(self, message: dict[str, object]) -> None:
        registration, now = self._registration, self._desk.now
        until = self._vouching.heard_vouch(message, now, registration.lease_deadline, self._run.outage_limit_s)
        if until is not None and self.runs_unbroken and now < registration.deadline:  # it revives nothing
            registration.vouched(until)

    def _send(self, messages: list[ToPeer], assign: AssignRecord) -> None:
        for node_id, message in messages:
            if node_id == self.node_id:
                self._peer_said(node_id, message)
            elif node_id == assign.first.node_id:
                self._desk.emit(SendPeer(assign.first, message))
            elif peer := self._vouching.address(node_id):
                self._desk.emit(SendPeer(peer, message))

    def _simply_runs(self) -> bool:
        """Whether the round runs, and nothing is known to us that will end it: only then may we promise."""
        record, assign = self._round, self._my_assign()
        if record is None or assign is None or record.phase is not Phase.RUNNING or assign.node_id != self.node_id:
            return False
        number = record.number
        lives = self._finished == number or (self._running == number and not self._stopping)
        known = self._proposer.trouble_known(number) if self._proposer else False
        return lives and self._in_trouble != number and not self._gone and not self._leaving and not known

    def _peer_gone(self, node_id: str) -> None:
        record, assign = self._round, self._my_assign()
        if record is None or assign is None or assign.successor is None or assign.successor.node_id != node_id:
            return
        number = record.number
        self._gone.add(node_id)
        self._report(Kind.LOST, node_id)
        self._desk.set_timer(f"fence {node_id}", self._desk.now + FENCE_S, lambda: self._fenced(number, node_id))
        if self._proposer:
            self._proposer.peer_gone()

    def _fenced(self, number: int, node_id: str) -> None:
        if self._round and self._round.number == number:
            self._report(Kind.FENCED, node_id)

    # --- the round -----------------------------------------------------------------------------------------------

    def _watch_round(self, from_revision: int) -> None:
        self._desk.unwatch(self._watch)
        self._watch = self._desk.watch(
            self._keys.round, prefix=False, from_revision=from_revision, heard=self._round_heard
        )

    def _round_heard(self, what: Changes | WatchLost) -> None:
        if isinstance(what, WatchLost):
            self._watch = None
            self._look()
            return
        for key, value, created, modified, lease in what.changes:
            self.see(None if value is None else KeyValue(key, value, created, modified, lease))

    def see(self, kv: KeyValue | None) -> None:
        """`round` as it stands, or stood: an older one than is known changes nothing. None: there is none."""
        if self._over:
            return
        if kv is None:
            self._refuse(StoreUnreachable("The run's keys were deleted.", "Start the run again."))
            return
        if kv.mod_revision <= self._round_revision:
            return
        try:
            record = read_round(kv.key, kv.value)
        except Malformed as problem:
            self._refuse(not_ours(problem))
            return
        before = self._round
        if before and (record.number, record.phase.order) < (before.number, before.phase.order):
            then, now = (f"{one.number} ({one.phase.value})" for one in (before, record))
            self._refuse(
                StoreUnreachable(
                    f"The key {kv.key} went back from round {then} to {now}: somebody else wrote it.",
                    "Start the run again with another --rdzv-id.",
                )
            )
            return
        self._round, self._round_revision = record, kv.mod_revision
        if before is None or before.number != record.number:
            self._gone = set()
        if before:
            self._say_of_round(before, record)
        self._outbox.send()
        self._follow_round()
        if before and record.phase is Phase.RUNNING and self.node_id in record.elders:
            self._find_turn()  # they are the new proposers

    def _say_of_round(self, before: RoundRecord, record: RoundRecord) -> None:
        if record.phase is Phase.STOPPING and before.phase is not Phase.STOPPING:
            self._say(f"round {record.number} stops: {record.reason}")
        elif record.phase is Phase.FORMING and before.number != record.number and record.reason != before.reason:
            self._say(f"round {record.number} forms: {record.reason}")

    def _follow_round(self) -> None:
        """Do what the round asks of this node, as far as it is not done: the same whenever it is looked at."""
        record = self._round
        if record is None or self._over or self._leave_asked:
            return
        stops = record.phase in {Phase.STOPPING, Phase.CLOSED}
        if self._running and (record.number > self._running or (record.number == self._running and stops)):
            self._stop_workers(record)
            return
        match record.phase:
            case Phase.CLOSED:
                self._end()
            case Phase.FORMING:
                self._get_ready(record.number)
            case _:
                self._take_part(record)

    def _get_ready(self, number: int) -> None:
        if not self._registration.is_valid or self._running or self._leaving or self._refused:
            return
        if self._meeting_for != (number, self.node_id):
            self._meeting_for = (number, self.node_id)
            self._desk.emit(OpenMeeting(number))

    def _meeting_opened(self, event: MeetingOpened) -> None:
        record = self._round
        if record and (event.round, self.node_id) == self._meeting_for and record.number == event.round:
            if self._is_passed(record) and not self._may_come_late(record):
                return
            meeting = event.address, event.port, event.served
            self._outbox.post(ReportRecord(event.round, self.node_id, Kind.READY, 0, *meeting))

    def _my_assign(self) -> AssignRecord | None:
        """Our assignment in the round that runs or stops, if we are a member of it."""
        record = self._round
        return self._assigns.get(record.nonce) if record and record.nonce else None

    def _take_part(self, record: RoundRecord) -> None:
        if record.nonce not in self._assigns:
            self._read_assign(record.nonce)
            return
        assign = self._assigns[record.nonce]
        number = record.number
        if assign is None:
            if self._is_passed(record) and self._may_come_late(record):
                self._get_ready(number)  # too late for this round: so it is known that this node does not hang
            if record.phase is Phase.RUNNING and self._registration.is_valid and self._spare_in != number:
                self._spare_in = number
                self._desk.set_timer("spare", self._desk.now + SPARE_S, lambda: self._say_spare(number))
            return
        if self._running or self._finished == number:
            return
        spent = self._dead >= number or assign.node_id != self.node_id
        if record.phase is Phase.STOPPING or spent or self._leaving or self._refused:
            self._dead = max(self._dead, number)
            self._report(Kind.STOPPED, assign.node_id)
        elif self._registration.is_valid and self._desk.now < self._registration.lease_deadline:
            self._start_workers(record, assign)

    def _is_passed(self, record: RoundRecord) -> bool:
        return record.phase is Phase.RUNNING and self.node_id in record.passed

    def _may_come_late(self, record: RoundRecord) -> bool:
        """Whether a round that runs without us may hear that we are ready by now: it is restarted to take us in.

        Not where the round before did not get us in time either: a slow node would restart the job for ever.
        """
        if self._passed_in != record.number:
            self._passed_twice = self._passed_in == record.number - 1
            self._passed_in = record.number
        return not self._passed_twice

    def _say_spare(self, number: int) -> None:
        record = self._round
        if record and record.number == number and record.phase is Phase.RUNNING and self._my_assign() is None:
            self._say("the job runs without this node, which waits as a spare")

    def _read_assign(self, nonce: str) -> None:
        self._assigns = {}
        request = Txn((), tuple(Range(self._keys.assign(nonce, node_id)) for node_id in self._registration.ids))
        if request.success and self._assign_asked != nonce:
            self._assign_asked = nonce
            self._desk.ask(request, TIMEOUT_S, lambda answer: self._assign_read(nonce, answer))

    def _assign_read(self, nonce: str, answer: Answer | StoreError) -> None:
        if not self._round or self._round.nonce != nonce:
            return
        if not isinstance(answer, TxnAnswer):
            self._assign_asked = None
            self._desk.retry("assign", self._follow_round)
            return
        found = [kv for answered in answer.ranges for kv in answered.kvs]
        try:
            assign = read_assign(found[0].key, found[0].value) if found else None
            if assign and assign.local_world_size != self._node.local_world_size:
                raise Malformed(found[0].key, "another number of workers than this node has")
        except Malformed as problem:
            self._refuse(not_ours(problem))
            return
        self._assigns[nonce] = assign
        if assign:
            self._vouching.enter(self._round.number, assign.members)
        self._follow_round()

    # --- whose turn it is ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look whether it is our turn to propose, and whether a watch has missed anything."""
        self._desk.set_timer("look", self._desk.now + LOOK_S, self._look)
        request = Txn(
            (),
            (
                Range(self._keys.round),
                self._first_nodes(),
                Range(self._keys.node(self.node_id), keys_only=True),
                *(() if self._running else (Range(self._keys.away_host(self._node.host), keys_only=True),)),
            ),
        )
        asked_as = self.node_id if self._registration.is_valid else ""
        self._desk.ask(request, TIMEOUT_S, lambda answer: self._looked(answer, asked_as))

    def _looked(self, answer: Answer | StoreError, asked_as: str) -> None:
        if not isinstance(answer, TxnAnswer):
            self._check_outage()
            return
        current, first, mine, *away = answer.ranges
        self.see(current.kvs[0] if current.kvs else None)
        if self._over or self._proposer is None:
            return
        if away and away[0].kvs:
            self._say(
                f"this node ({self._node.host}) was set aside, because its workers failed again and again while "
                f"others' did not: it waits for up to {self._run.cool_down_s:g} s (--max-node-failures)"
            )
        if self._watch is None:
            self._watch_round(answer.revision + 1)
        if asked_as == self.node_id and not mine.kvs and self._registration.is_valid:
            self._registration.is_valid = False  # deleted by hand: its lease goes on, but nobody sees us any more
            self.lost()
        self._take_turn(first)

    def _find_turn(self) -> None:
        """Look only whether it is our turn: between two looks, when it may just have become so."""
        self._desk.ask(self._first_nodes(), TIMEOUT_S, self._turn_found)

    def _first_nodes(self) -> Range:
        first, beyond = self._keys.oldest_nodes
        return Range(first, end=beyond, limit=FIRST_NODES, keys_only=True)

    def _turn_found(self, answer: Answer | StoreError) -> None:
        if isinstance(answer, RangeAnswer):
            self._take_turn(answer)

    def _take_turn(self, first: RangeAnswer) -> None:
        if self._proposer is None or self._over:
            return
        ids = (self._keys.node_of(kv.key) for kv in first.kvs)
        oldest = [node_id for node_id in ids if node_id and is_node_id(node_id)]
        present = [elder for elder in self._round.elders if elder in oldest] if self._round else []
        self._proposer.be(self._turn(present, oldest) if self._registration.is_valid else None)

    def _turn(self, elders: list[str], oldest: list[str]) -> int | None:
        """Which of the proposers this agent is: members first, by arrival; then other nodes, oldest first."""
        order = [*elders, *(node_id for node_id in oldest if node_id not in elders)]
        if self.node_id in order[:PROPOSERS]:
            return order.index(self.node_id)
        assign = self._my_assign()
        if not elders and assign:
            return PROPOSERS + assign.group_rank  # all elders are gone at once: every member looks
        return None

    # --- this node's workers -------------------------------------------------------------------------------------

    def _start_workers(self, record: RoundRecord, assign: AssignRecord) -> None:
        self._running = record.number
        self._stopping = False
        self._registration.forget_vouch()
        self._desk.emit(FollowPeer(assign.successor))
        self._desk.emit(RunRound(as_assignment(assign, record.number, record.restarts)))

    def _stop_workers(self, record: RoundRecord) -> None:
        self._stopping = True
        if self._told_to_stop != self._running:
            self._told_to_stop = self._running
            is_ours = record.number == self._running and record.culprit == self._member_id()
            self._desk.emit(StopRound(self._running, record.reason, is_ours=is_ours))

    def _workers_failed(self, number: int, failure: Failure) -> None:
        if number == self._running:
            self._in_trouble = number
            self._stopping = True
            self._outbox.post(ReportRecord(number, self._member_id(), Kind.FAILED, 0, failure=failure))

    def _workers_stopped(self, number: int, failure: Failure | None) -> None:
        if number != self._running:
            return
        self._running = 0
        self._dead = max(self._dead, number)
        if failure:
            self._outbox.post(ReportRecord(number, self._member_id(), Kind.FAILED, 0, failure=failure))
        self._outbox.post(ReportRecord(number, self._member_id(), Kind.STOPPED, 0, failure=failure))
        self._after_workers()

    def _workers_finished(self, number: int) -> None:
        if number != self._running:
            return
        self._running = 0
        self._finished = number
        self._outbox.post(ReportRecord(number, self._member_id(), Kind.FINISHED, 0))
        self._after_workers()

    def _after_workers(self) -> None:
        self._stopping = False
        if not self._registration.is_valid:
            self.lost()
        self._follow_round()

    def _member_id(self) -> str:
        assign = self._my_assign()
        return assign.node_id if assign else self.node_id

    def _report(self, kind: Kind, node_id: str) -> None:
        if self._round:
            self._outbox.post(ReportRecord(self._round.number, node_id, kind, 0))

    # --- ends ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The run is closed and no worker of ours lives."""
        registration = self._registration
        if self._ends or registration.is_under_way:
            return
        self._ends = True
        if not registration.was_ever_valid:
            self._say("the run had ended before this node came")
        since = self._desk.now
        if registration.is_valid:
            registration.give_up(lambda: self._linger(since))
        else:
            self._linger(since)

    def _linger(self, since: float) -> None:
        """Where the store ends with us, the others have to read the end first."""
        if not self._settings.lingers or self._desk.now - since >= LINGER_S:
            self._end_now()
            return
        request = Range(self._keys.nodes, prefix=True, count_only=True)
        self._desk.ask(request, TIMEOUT_S, lambda answer: self._linger_on(answer, since))

    def _linger_on(self, answer: Answer | StoreError, since: float) -> None:
        if isinstance(answer, RangeAnswer) and answer.count == 0:
            self._end_now()
        else:
            self._desk.set_timer("linger", self._desk.now + RETRY_S, lambda: self._linger(since))

    def _end_now(self) -> None:
        if self._leave_asked:  # meanwhile, and that is what is waited for now
            self._left()
            return
        assert self._round
        assert self._round.ending
        self._shut()
        self._desk.emit(EndRun(self._round.ending))

    def _shut(self) -> None:
        self._over = True
        self._desk.emit(FollowPeer(None))
        self._desk.stop()

    def _begin_to_leave(self, reason: str) -> None:
        self._leaving = reason
        assign = self._my_assign()
        if self._round and assign and self._round.phase is Phase.RUNNING and assign.node_id == self.node_id:
            self._outbox.post(ReportRecord(self._round.number, self.node_id, Kind.LEAVING, 0, reason=reason))

    def _leave(self, reason: str) -> None:
        """Write what has to be written, give up the registration, and go."""
        self._leaving = self._leaving or reason
        self._leave_asked = True
        if self._spec is None:
            self._left()
            return
        self._desk.set_timer("leave", self._desk.now + LEAVE_S, self._left)
        assign, record = self._my_assign(), self._round
        if assign and record and record.phase is not Phase.CLOSED and self._finished != record.number:
            self._report(Kind.STOPPED, assign.node_id)
        self._outbox.when_empty = self._finish_leaving
        self._outbox.send()

    def _finish_leaving(self) -> None:
        if not self._leave_asked or not self._outbox.is_empty:
            return
        self._outbox.when_empty = None
        if self._registration.is_valid:
            self._registration.give_up(self._left)
        elif not self._registration.is_under_way:
            self._left()

    def _left(self) -> None:
        self._shut()
        self._desk.emit(Left())

    def _trouble(self, error: StoreError) -> None:
        """A write of ours failed; it is tried again, but the user should know why nothing moves."""
        if error.trouble is Trouble.NO_LEASE:
            sentence = "The lease that the run's keys stand on is gone: it lasts an hour after the last agent was seen."
            self._refuse(StoreUnreachable(sentence, "Start the run again with another --rdzv-id."))
        elif error.is_lasting and error.trouble is not Trouble.TOO_LARGE:
            self._refuse(StoreUnreachable(error.sentence, "See --rdzv-endpoint."))
        elif error.trouble in {Trouble.OTHER, Trouble.TOO_LARGE}:
            self._say(f"the store refuses what has to be written: {error.sentence}")

    def _refuse(self, error: DlaunchError) -> None:
        """This node takes no further part. What it registered goes when it leaves."""
        if not self._refused:
            self._refused = True
            self._desk.emit(Refuse(error))

    def _store_went_back(self, known: int, found: int) -> None:
        self._desk.went_back = None
        self._refuse(
            StoreUnreachable(
                f"etcd shows revision {found} after {known}: it was restored from an older state, so nothing in it "
                "tells what runs. The workers were stopped.",
                "Start the run again with another --rdzv-id.",
            )
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._desk.emit(Say(text))
