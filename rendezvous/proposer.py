"""The part of a member that acts for all: sees everything, asks `decide`, and commits by one compare-and-swap.

Three agents do this at a time, the i-th a little after the (i-1)-th, so that one is enough and none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dlaunch.errors import DlaunchError, StoreUnreachable

from .board import Board
from .decide import FOLD_S, Decision, LookAgain, Sight, decide
from .desk import TIMEOUT_S, Desk
from .effects import Say
from .keys import Keys
from .lapses import Lapses, Standing
from .records import Kind, Phase, RunSettings, write_assign, write_round
from .store import (
    Answer,
    Changes,
    Compare,
    Delete,
    GrantLease,
    KeepAlive,
    KeyValue,
    LeaseGranted,
    Operation,
    Put,
    Range,
    RangeAnswer,
    StoreError,
    Target,
    Txn,
    TxnAnswer,
    WatchLost,
)

PROPOSERS = 3
STAGGER_S = 0.03  # the i-th proposer acts i times this later
CONSIDER_S = FOLD_S / 2
WAITING_S = 3.0  # a round that forms for longer is told of
PIECE = 100  # assignments in one transaction
_LEAVES_ROUND = {Phase.FORMING, Phase.CLOSED}
LIST_ALL_EVERY = 4  # lists of registrations to one list of everything


class Proposer:
    """Sees all keys of the run while it is active."""

    def __init__(
        self,
        desk: Desk,
        keys: Keys,
        settings: RunSettings,
        run_lease: int,
        timeout_s: float,
        fresh: Callable[[], str],
        see: Callable[[KeyValue | None], None],
        standing: Callable[[], Standing],
        trouble: Callable[[StoreError], None],
        broken: Callable[[DlaunchError], None],
    ) -> None:
        """``see`` gets `round` as it is found; ``trouble``: a write failed; ``broken``: keys of the run are missing."""
        self.board = Board(keys)
        self._desk = desk
        self._keys = keys
        self._settings = settings
        self._run_lease = run_lease
        self._timeout_s = timeout_s
        self._fresh = fresh
        self._see = see
        self._trouble = trouble
        self._broken = broken
        self._lapses = Lapses(desk, keys, settings, self.board, standing, self._listed)
        self._lists = 0
        self._listing = False
        self._index: int | None = None  # None: not active
        self._watch: int | None = None
        self._loaded = False
        self._since: tuple[tuple[int, Phase], float] | None = None
        self._arrival_at = 0.0
        self._ripe: tuple[int, float] | None = None  # a decision at a revision of `round`, and when to commit it
        self._committing = False
        self._considers_soon = False
        self._said_of = 0  # the last round whose forming was told of
        self._complained: set[str] = set()

    @property
    def is_active(self) -> bool:
        """Whether it sees and proposes."""
        return self._index is not None

    def be(self, index: int | None) -> None:
        """Become the ``index``-th proposer, or none."""
        was, self._index = self._index, index
        if index is None and was is not None:
            self._rest()
        elif index is not None and was is None:
            self._list_all()
            self._lapses.know_store()
            self._desk.set_timer("list", self._desk.now + self._lapses.every_s, self._list)

    def peer_gone(self) -> None:
        """A member was found gone by this agent itself."""
        self._lapses.proofs.member_ended(self._desk.now)
        self.consider()

    def trouble_known(self, number: int) -> bool:
        """Whether it is known that a round is not simply running."""
        record = self.board.round
        if not self._loaded or record is None or record.number != number:
            return False
        reports = self.board.reports.get(number, {})
        return self._lapses.proofs.knows_of_a_loss(number) or any(
            kind not in {Kind.READY, Kind.FINISHED} for of_node in reports.values() for kind in of_node
        )

    def _rest(self) -> None:
        self._desk.unwatch(self._watch)
        self._watch = None
        self._loaded = False
        self._considers_soon = False
        for name in ("list", "decide", "list-again", "waiting", "consider"):
            self._desk.cancel_timer(name)

    # --- seeing --------------------------------------------------------------------------------------------------

    def _list_all(self) -> None:
        if not self._listing and self.is_active:
            self._listing = True
            self._desk.ask(Range(self._keys.root, prefix=True), TIMEOUT_S, self._listed_all)

    def _listed_all(self, answer: Answer | StoreError) -> None:
        self._listing = False
        if not self.is_active:
            return
        if not isinstance(answer, RangeAnswer):
            self._desk.retry("list-again", self._list_all)
            return
        before = set(self.board.nodes)
        self.board.load(answer.kvs)
        if not self._loaded or not before >= set(self.board.nodes):
            self._arrival_at = self._desk.now
        self._loaded = True
        self._desk.unwatch(self._watch)
        self._watch = self._desk.watch(
            self._keys.root, prefix=True, from_revision=answer.revision + 1, heard=self._heard
        )
        self._see(next((kv for kv in answer.kvs if kv.key == self._keys.round), None))
        record = self.board.round
        if record and record.phase in {Phase.RUNNING, Phase.STOPPING} and self.board.members() is None:
            sentence = f"The assignments of round {record.number} are missing: somebody deleted or damaged them."
            self._broken(StoreUnreachable(sentence, "Start the run again with another --rdzv-id."))
        self.consider()

    def _heard(self, what: Changes | WatchLost) -> None:
        if isinstance(what, WatchLost):
            self._watch = None
            self._list_all()
            return
        for change in what.changes:
            self.board.apply(change)
            if change.value is None:
                if change.key.startswith(self._keys.nodes):
                    # a lapse, or a leave: only a list can prove the first
                    self._desk.set_timer("list", self._desk.now + CONSIDER_S, self._list)
            elif change.key.startswith((self._keys.nodes, self._keys.every_report)):
                self._arrival_at = self._desk.now
            elif change.key == self._keys.round:
                self._see(KeyValue(change.key, change.value, change.create_revision, change.mod_revision))
        if not self._considers_soon:
            self._considers_soon = True  # a thousand reports come one by one, and each look is at all of them
            self._desk.set_timer("consider", self._desk.now + CONSIDER_S, self.consider)

    def _list(self) -> None:
        """List the registrations: the ground of proofs, and a check of what the watch told."""
        if not self.is_active:
            return
        self._lists += 1
        self._desk.set_timer("list", self._desk.now + self._lapses.every_s, self._list)
        if self._lists % LIST_ALL_EVERY == 0:
            self._list_all()
            self._lapses.know_store()
            self._desk.ask(KeepAlive(self._run_lease), TIMEOUT_S, lambda _answer: None)
        self._lapses.list()

    def _listed(self, registered: set[str]) -> None:
        if registered != set(self.board.nodes):
            self._list_all()
        self.consider()

    # --- deciding ------------------------------------------------------------------------------------------------

    def consider(self) -> None:
        """Look whether anything is to be decided, and commit it when its time has come."""
        desk, board = self._desk, self.board
        self._considers_soon = False
        for complaint in board.complaints:
            if complaint not in self._complained and len(self._complained) < 20:
                self._complained.add(complaint)
                desk.emit(Say(f"{complaint}: left out. Somebody else writes under this run's keys."))
        board.complaints.clear()
        if not self._loaded or self._committing or board.round is None or self._index is None:
            return
        self._lapses.enter(board.round.number)
        sight = self._sight()
        decision = decide(sight) if sight else None
        if isinstance(decision, Decision):
            self._commit_when_ripe(decision, self._index)
            return
        self._ripe = None
        if isinstance(decision, LookAgain):
            desk.set_timer("decide", decision.at, self.consider)
        else:
            desk.cancel_timer("decide")
        if board.round.phase is Phase.FORMING and self._said_of < board.round.number:
            number, self._said_of = board.round.number, board.round.number
            desk.set_timer("waiting", desk.now + WAITING_S, lambda: self._say_waiting(number))

    def _say_waiting(self, number: int) -> None:
        record, settings = self.board.round, self._settings
        if not self.is_active or record is None or record.number != number or record.phase is not Phase.FORMING:
            return
        wanted = (
            f"{settings.min_nodes}" if settings.min_nodes == settings.max_nodes else f"{settings.min_nodes} or more"
        )
        hosts = ", ".join(sorted(node.host for node in self.board.nodes.values())[:10])
        self._desk.emit(Say(f"waiting for nodes: {len(self.board.nodes)} of {wanted} are here ({hosts})"))

    def _sight(self) -> Sight | None:
        board, now = self.board, self._desk.now
        record, members = board.round, board.members()
        if record is None or members is None:
            return None
        stands = (record.number, record.phase)
        if self._since is None or self._since[0] != stands:
            self._since = (stands, now)
        return Sight(
            settings=self._settings,
            round=record,
            members=members,
            nodes=board.nodes,
            reports=board.reports.get(record.number, {}),
            away=self._away_hosts(),
            fenced=frozenset(self._lapses.proofs.fenced),
            stop_wish=board.stop_wish,
            timeout_s=self._timeout_s,
            since=self._since[1],
            arrival_at=self._arrival_at,
            now=now,
        )

    def _away_hosts(self) -> frozenset[str]:
        away = self.board.away
        nodes = self.board.nodes.values() if away else ()
        return frozenset(node.host for node in nodes if self._keys.away_host(node.host) in away)

    def _commit_when_ripe(self, decision: Decision, index: int) -> None:
        now, revision = self._desk.now, self.board.round_revision
        if self._ripe is None or self._ripe[0] != revision:
            self._ripe = (revision, now + FOLD_S / 2 + index * STAGGER_S)
        if now < self._ripe[1]:
            self._desk.set_timer("decide", self._ripe[1], self.consider)
            return
        self._ripe = None
        self._committing = True
        before = self.board.round
        if before and before.phase in {Phase.RUNNING, Phase.STOPPING} and decision.record.phase in _LEAVES_ROUND:
            self._check_reports(before.number, revision)
        else:
            self._carry_out(decision, revision)

    def _check_reports(self, number: int, revision: int) -> None:
        """What a round has come to is decided on a list: a watch may have lost just the report that counts."""
        request = Txn((), (Range(self._keys.round), Range(self._keys.reports(number), prefix=True)))
        self._desk.ask(request, TIMEOUT_S, lambda answer: self._reports_checked(answer, number, revision))

    def _reports_checked(self, answer: Answer | StoreError, number: int, revision: int) -> None:
        if not isinstance(answer, TxnAnswer) or [kv.mod_revision for kv in answer.ranges[0].kvs] != [revision]:
            self._fail(answer)
            return
        self.board.load_reports(number, answer.ranges[1].kvs)
        sight = self._sight() if self.board.round_revision == revision else None
        decision = decide(sight) if sight else None
        if isinstance(decision, Decision):
            self._carry_out(decision, revision)
        else:
            self._fail(answer)

    def _carry_out(self, decision: Decision, revision: int) -> None:
        if decision.set_aside:
            ttl_s = math.ceil(self._settings.cool_down_s)
            self._desk.ask(GrantLease(ttl_s), TIMEOUT_S, lambda answer: self._set_aside(decision, revision, answer))
        else:
            self._write(decision, revision, ())

    def _set_aside(self, decision: Decision, revision: int, answer: Answer | StoreError) -> None:
        if not isinstance(answer, LeaseGranted):
            self._fail(answer)
            return
        self._write(decision, revision, (Put(self._keys.away_host(decision.set_aside), b"{}", answer.lease),))

    def _write(self, decision: Decision, revision: int, also: tuple[Operation, ...]) -> None:
        """Prepare in pieces, commit by the one swap."""
        nonce = self._fresh() if decision.assigns else decision.record.nonce
        puts = [
            Put(self._keys.assign(nonce, record.node_id), write_assign(record), self._run_lease)
            for record in decision.assigns
        ]
        pieces = [tuple(puts[start : start + PIECE]) for start in range(0, len(puts), PIECE)]
        swap = self._swap(decision._replace(record=decision.record._replace(nonce=nonce)), also)
        self._write_next(pieces, swap, revision)

    def _swap(self, decision: Decision, also: tuple[Operation, ...]) -> tuple[Operation, ...]:
        before = self.board.round
        gone: list[Operation] = []
        if before and decision.record.number != before.number:
            gone.append(Delete(self._keys.reports(before.number), prefix=True))
            gone += [Delete(self._keys.node(node_id)) for node_id in decision.dropped]
            if before.nonce:
                gone.append(Delete(self._keys.assigns(before.nonce), prefix=True))
        return (Put(self._keys.round, write_round(decision.record), self._run_lease), *also, *gone)

    def _write_next(self, pieces: list[tuple[Put, ...]], swap: tuple[Operation, ...], revision: int) -> None:
        unchanged = Compare(self._keys.round, Target.MOD_REVISION, revision)
        if pieces:
            piece, *rest = pieces
            self._desk.ask(
                Txn((unchanged,), piece), TIMEOUT_S, lambda answer: self._written(answer, rest, swap, revision)
            )
        else:
            self._desk.ask(Txn((unchanged,), swap), TIMEOUT_S, lambda answer: self._swapped(answer, swap))

    def _written(
        self,
        answer: Answer | StoreError,
        rest: list[tuple[Put, ...]],
        swap: tuple[Operation, ...],
        revision: int,
    ) -> None:
        if isinstance(answer, TxnAnswer) and answer.succeeded:
            self._write_next(rest, swap, revision)
        else:
            self._fail(answer)

    def _swapped(self, answer: Answer | StoreError, swap: tuple[Operation, ...]) -> None:
        """Whether it landed, where there is no answer, shows in the next list: nothing is repeated blindly."""
        if not isinstance(answer, TxnAnswer) or not answer.succeeded:
            self._fail(answer)
            return
        self._committing = False
        put = swap[0]
        assert isinstance(put, Put)
        self._see(KeyValue(put.key, put.value, 1, answer.revision, put.lease))  # the watch brings it to the board

    def _fail(self, answer: Answer | StoreError) -> None:
        self._committing = False
        if isinstance(answer, StoreError):
            self._trouble(answer)
            self._desk.retry("list-again", self._list_all)
        else:
            self._list_all()
