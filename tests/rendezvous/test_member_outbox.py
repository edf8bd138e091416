"""Reports on their way: in order, each once, and an ambiguous write is looked up, never repeated blindly."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dlaunch.outcome import Failure, FailureKind
from dlaunch.rendezvous.desk import Desk
from dlaunch.rendezvous.effects import Ask, CancelTimer, SetTimer
from dlaunch.rendezvous.events import Answered, TimerFired, WatchHeard
from dlaunch.rendezvous.keys import Keys
from dlaunch.rendezvous.memory import MemoryKeys
from dlaunch.rendezvous.outbox import Outbox, RoundSeen
from dlaunch.rendezvous.records import Kind, ReportRecord, read_report
from dlaunch.rendezvous.store import (
    Answer,
    Changes,
    GrantLease,
    LeaseAlive,
    LeaseGranted,
    Put,
    Range,
    RangeAnswer,
    StoreError,
    Trouble,
    Txn,
    WatchLost,
)

KEYS = Keys.of("/dlaunch", "run")
LOST = StoreError(Trouble.TIMEOUT, "etcd did not answer.", maybe_done=True)
NOT_SENT = StoreError(Trouble.UNREACHABLE, "etcd cannot be reached.")


def report(kind: Kind = Kind.READY, number: int = 1, node_id: str = "n1") -> ReportRecord:
    return ReportRecord(number, node_id, kind, 0)


class Sender:
    """An outbox whose requests a test answers by hand, from keys in memory."""

    def __init__(self) -> None:
        self.memory = MemoryKeys()
        granted = self.memory.apply(GrantLease(60), 0.0)
        assert isinstance(granted, LeaseGranted)
        self.lease = granted.lease
        self.desk = Desk()
        self.number, self.revision = 0, 0
        self.troubles: list[StoreError] = []
        self.is_readable = True
        self.outbox = Outbox(self.desk, KEYS, self._seen, lambda _kv: self.look(), self.troubles.append)
        self.move_round(1)
        self.look()

    def _seen(self) -> RoundSeen:
        return RoundSeen(self.number, self.revision)

    def move_round(self, number: int) -> None:
        """Somebody swaps `round`; the outbox does not know yet."""
        self.memory.apply(Txn((), (Put(KEYS.round, str(number).encode()),)), 0.0)

    def look(self) -> None:
        """See `round` as it stands, where it can be read."""
        if not self.is_readable:
            return
        answer = self.memory.apply(Range(KEYS.round), 0.0)
        assert isinstance(answer, RangeAnswer)
        self.number, self.revision = int(answer.kvs[0].value), answer.kvs[0].mod_revision

    def asked(self) -> list[Ask]:
        """What was sent since the last time."""
        return [effect for effect in self.desk.take_effects() if isinstance(effect, Ask)]

    def answer(self, ask: Ask, error: StoreError | None = None, *, done: bool = True) -> None:
        """The store performs a request (or not: ``done``), and answers (or not: ``error``)."""
        found = self.memory.apply(ask.request, 0.0) if done else None
        answer: Answer | StoreError | None = error or found
        assert answer
        self.desk.answered(Answered(ask.id, answer))

    def answer_all(self) -> None:
        while asks := self.asked():
            for ask in asks:
                self.answer(ask)

    def again(self) -> None:
        """The pause after a failure is over."""
        self.desk.fired(TimerFired("reports"))

    def written(self) -> list[str]:
        """Reports in the store, by creation."""
        answer = self.memory.apply(Range(KEYS.every_report, prefix=True), 0.0)
        assert isinstance(answer, RangeAnswer)
        kvs = sorted(answer.kvs, key=lambda kv: kv.create_revision)
        assert all(kv.create_revision == kv.mod_revision for kv in kvs), "a report was written twice"
        return [kv.key.removeprefix(KEYS.every_report) for kv in kvs]


@pytest.fixture
def sender() -> Sender:
    return Sender()


def test_nothing_is_sent_before_the_lease_of_the_run_is_known(sender: Sender) -> None:
    sender.outbox.post(report())
    assert sender.asked() == []
    sender.outbox.open(sender.lease)
    assert len(sender.asked()) == 1


def test_reports_are_written_in_their_order_one_at_a_time(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    for kind in (Kind.READY, Kind.FAILED, Kind.STOPPED):
        sender.outbox.post(report(kind))
    (only,) = sender.asked()
    assert sender.written() == []
    sender.answer(only)
    sender.answer_all()
    assert sender.written() == ["1/n1/ready", "1/n1/failed", "1/n1/stopped"]
    assert sender.outbox.is_empty


def test_a_report_is_written_once_however_often_it_is_posted(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    for _ in range(3):
        sender.outbox.post(report())
        sender.answer_all()
    assert sender.written() == ["1/n1/ready"]


class Case(NamedTuple):
    """A write of which no answer came."""

    name: str
    done: bool


@pytest.mark.parametrize("case", [Case("it was done", True), Case("it was not", False)], ids=lambda case: case.name)
def test_a_write_without_an_answer_is_resolved_by_the_next(sender: Sender, case: Case) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.FAILED))
    sender.outbox.post(report(Kind.STOPPED))
    (ask,) = sender.asked()
    sender.answer(ask, LOST, done=case.done)
    assert sender.asked() == []  # not at once
    assert not sender.outbox.is_empty
    sender.again()
    sender.answer_all()
    assert sender.written() == ["1/n1/failed", "1/n1/stopped"]
    assert sender.outbox.is_empty


def test_a_write_that_lands_late_does_no_harm(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report())
    (late,) = sender.asked()
    sender.answer(late, LOST, done=False)
    sender.again()
    sender.answer_all()
    sender.memory.apply(late.request, 0.0)
    assert sender.written() == ["1/n1/ready"]


def test_a_report_of_a_round_that_has_moved_on_within_itself_is_sent_again(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.FAILED))
    sender.move_round(1)  # running -> stopping: the same number at a higher revision
    sender.answer_all()
    assert sender.written() == ["1/n1/failed"]


def test_a_report_of_a_round_that_is_over_is_dropped(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.STOPPED))
    sender.move_round(2)
    sender.answer_all()
    assert sender.written() == []
    assert sender.outbox.is_empty


def test_a_report_of_a_round_that_is_not_seen_yet_waits_for_it(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(number=2))
    assert sender.asked() == []
    sender.move_round(2)
    sender.look()
    sender.outbox.send()
    sender.answer_all()
    assert sender.written() == ["2/n1/ready"]


def test_whoever_waits_is_told_when_all_is_written(sender: Sender) -> None:
    told: list[str] = []
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.STOPPED))
    sender.outbox.when_empty = lambda: told.append("empty")
    (ask,) = sender.asked()
    sender.answer(ask, NOT_SENT, done=False)
    assert told == []
    sender.again()
    sender.answer_all()
    assert told


def test_a_failure_to_write_is_told_of(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report())
    sender.answer(sender.asked()[0], NOT_SENT, done=False)
    assert sender.troubles == [NOT_SENT]


def test_a_failure_too_large_for_the_store_is_told_without_its_details(sender: Sender) -> None:
    failure = Failure(FailureKind.EXIT, 0, 1, 1, "host", 7, None, 0.0, 0.0, last_output=("\u4e00" * 20_000,) * 40)
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.FAILED)._replace(failure=failure))
    (ask,) = sender.asked()
    sender.answer(ask)
    sender.again()
    sender.answer_all()
    assert sender.written() == ["1/n1/failed"]
    answer = sender.memory.apply(Range(KEYS.every_report, prefix=True), 0.0)
    assert isinstance(answer, RangeAnswer)
    told = read_report(answer.kvs[0].key, answer.kvs[0].value, 1).failure
    assert told
    assert (told.rank, told.last_output) == (1, ())


def test_a_round_that_cannot_be_read_is_not_asked_for_without_a_pause(sender: Sender) -> None:
    sender.outbox.open(sender.lease)
    sender.outbox.post(report(Kind.STOPPED))
    sender.is_readable = False
    sender.move_round(1)
    (ask,) = sender.asked()
    sender.answer(ask)
    assert sender.asked() == []


# --- the desk --------------------------------------------------------------------------------------------------------


def test_an_answer_finds_who_asked_once() -> None:
    desk = Desk()
    heard: list[Answer | StoreError] = []
    desk.ask(Range("a"), 1.0, heard.append)
    desk.ask(Range("b"), 1.0, lambda _answer: None)
    first = next(effect for effect in desk.take_effects() if isinstance(effect, Ask))
    answer = RangeAnswer(7, (), 0)
    desk.answered(Answered(first.id, answer))
    desk.answered(Answered(first.id, answer))
    assert heard == [answer]


def test_a_timer_of_a_name_replaces_the_one_before() -> None:
    desk, fired = Desk(), []
    desk.set_timer("x", 1.0, lambda: fired.append("first"))
    desk.set_timer("x", 2.0, lambda: fired.append("second"))
    desk.fired(TimerFired("x"))
    desk.fired(TimerFired("x"))
    assert fired == ["second"]
    desk.set_timer("y", 1.0, lambda: fired.append("never"))
    desk.cancel_timer("y")
    desk.cancel_timer("y")
    desk.fired(TimerFired("y"))
    assert fired == ["second"]
    told = desk.take_effects()
    assert [effect for effect in told if not isinstance(effect, SetTimer)] == [CancelTimer("y")]


def test_a_lost_watch_is_heard_of_once() -> None:
    desk = Desk()
    heard: list[Changes | WatchLost] = []
    number = desk.watch("a", prefix=True, from_revision=1, heard=heard.append)
    lost = WatchLost("compacted")
    desk.heard(WatchHeard(number, lost))
    desk.heard(WatchHeard(number, Changes(9, ())))
    assert heard == [lost]


def answered(desk: Desk, answer: Answer) -> None:
    desk.ask(Range("a"), 1.0, lambda _answer: None)
    ask = [effect for effect in desk.take_effects() if isinstance(effect, Ask)][-1]
    desk.answered(Answered(ask.id, answer))


def test_a_store_that_shows_less_than_it_has_shown_was_restored() -> None:
    desk = Desk()
    answered(desk, RangeAnswer(10, (), 0))
    answered(desk, RangeAnswer(10, (), 0))
    assert desk.went_back is None
    answered(desk, RangeAnswer(9, (), 0))
    assert desk.went_back == (10, 9)


def test_an_answer_that_was_asked_for_before_proves_nothing() -> None:
    desk = Desk()
    heard: list[Answer | StoreError] = []
    desk.ask(Range("a"), 1.0, heard.append)
    early = next(effect for effect in desk.take_effects() if isinstance(effect, Ask))
    answered(desk, RangeAnswer(10, (), 0))
    desk.answered(Answered(early.id, RangeAnswer(9, (), 0)))
    assert desk.went_back is None
    assert len(heard) == 1


def test_nor_does_an_answer_about_a_lease() -> None:
    desk = Desk()
    answered(desk, RangeAnswer(10, (), 0))
    answered(desk, LeaseAlive(9, 5))
    assert desk.went_back is None


def test_a_watch_that_is_ahead_is_known_too() -> None:
    desk = Desk()
    number = desk.watch("a", prefix=True, from_revision=1, heard=lambda _what: None)
    desk.heard(WatchHeard(number, Changes(12, ())))
    answered(desk, RangeAnswer(11, (), 0))
    assert desk.went_back == (12, 11)
