"""The simulated store fails as etcd does, and in no other way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dlaunch.rendezvous.store import (
    Changes,
    Compare,
    GrantLease,
    KeepAlive,
    LeaseAlive,
    LeaseGranted,
    Put,
    Range,
    RangeAnswer,
    StoreError,
    Target,
    Trouble,
    Txn,
    TxnAnswer,
    WatchLost,
)
from dlaunch.simulation.clock import Scheduler
from dlaunch.simulation.etcd import Client, Etcd
from dlaunch.simulation.faults import Leases, Snag, Trap
from dlaunch.simulation.story import Story
from dlaunch.simulation.weather import FAIR, Weather


class Bench:
    """A store with one client, and what it has heard."""

    def __init__(self, weather: Weather = FAIR) -> None:
        self.scheduler = Scheduler()
        self.etcd = Etcd(self.scheduler, random.Random(1), weather, Story(self.scheduler, kept=False))
        self.client = self.etcd.client("A")
        self.heard: list[Any] = []

    def ask(self, request: Any, timeout_s: float = 2.0, trap: Trap | None = None, client: Client | None = None) -> Any:
        answers: list[Any] = []
        (client or self.client).ask(request, timeout_s, answers.append, trap)
        while not answers:
            assert self.scheduler.step(self.scheduler.now + 60.0)
        assert len(answers) == 1
        return answers[0]

    def put(self, key: str, lease: int = 0, **other: Any) -> Any:
        return self.ask(Txn((), (Put(key, b"x", lease),)), **other)

    def names(self) -> list[str]:
        answer = self.etcd.keys.apply(Range("", prefix=True), self.scheduler.now)
        assert isinstance(answer, RangeAnswer)
        return [kv.key for kv in answer.kvs]

    def wait(self, seconds: float) -> None:
        until = self.scheduler.now + seconds
        while self.scheduler.step(until):
            pass

    def watch(self, from_revision: int = 1) -> None:
        self.client.watch("k", True, from_revision, self.heard.append)
        self.wait(0.1)

    def heard_keys(self) -> list[str]:
        return [change.key for one in self.heard if isinstance(one, Changes) for change in one.changes]


def test_a_request_takes_its_time() -> None:
    bench = Bench()
    assert isinstance(bench.put("k1"), TxnAnswer)
    assert 0.002 <= bench.scheduler.now <= 0.008


def test_a_write_whose_answer_is_lost_has_happened_and_is_reported_as_open() -> None:
    bench = Bench()
    answer = bench.put("k1", trap=Trap("", "", Snag.ANSWER_LOST))
    assert answer == StoreError(Trouble.TIMEOUT, "etcd did not answer", maybe_done=True)
    assert bench.names() == ["k1"]
    assert bench.scheduler.now == pytest.approx(2.0)


def test_a_late_write_happens_after_its_sender_has_given_up() -> None:
    bench = Bench()
    assert bench.put("k1", trap=Trap("", "", Snag.LATE, 5.0)).maybe_done
    assert bench.names() == []
    bench.wait(3.1)
    assert bench.names() == ["k1"]


def test_a_late_swap_loses_against_one_that_came_meanwhile() -> None:
    bench = Bench()
    swap = Txn((Compare("k", Target.CREATE_REVISION, 0),), (Put("k", b"old"),))
    assert bench.ask(swap, trap=Trap("", "", Snag.LATE, 5.0)).maybe_done
    bench.put("k")
    bench.wait(5.0)
    answer = bench.ask(Range("k"))
    assert answer.kvs[0].value == b"x"


def test_a_read_that_fails_leaves_nothing_open() -> None:
    bench = Bench()
    bench.client.set_cut(True)
    assert bench.ask(Range("k")) == StoreError(Trouble.TIMEOUT, "etcd did not answer", maybe_done=False)


def test_a_refusal_comes_at_once() -> None:
    bench = Bench()
    bench.etcd.stop(refuses=True)
    assert bench.put("k1").trouble is Trouble.UNREACHABLE
    assert bench.scheduler.now < 0.1


def test_what_a_dead_client_has_sent_arrives_and_it_hears_nothing() -> None:
    bench = Bench()
    answers: list[Any] = []
    bench.client.ask(Txn((), (Put("k1", b"x"),)), 2.0, answers.append)
    bench.client.close()
    bench.wait(10.0)
    assert bench.names() == ["k1"]
    assert answers == []


def test_a_watch_goes_on_after_a_cut_with_what_it_has_missed() -> None:
    bench = Bench()
    bench.watch()
    other = bench.etcd.client("B")
    bench.put("k1")
    bench.wait(0.1)
    bench.client.set_cut(True)
    bench.put("k2", client=other)
    bench.wait(1.0)
    assert bench.heard_keys() == ["k1"]
    bench.client.set_cut(False)
    bench.wait(2.0)
    assert bench.heard_keys() == ["k1", "k2"]


def test_a_watch_is_lost_where_what_it_has_missed_was_compacted() -> None:
    bench = Bench()
    bench.watch()
    other = bench.etcd.client("B")
    bench.client.set_cut(True)
    for name in ("k1", "k2", "k3"):
        bench.put(name, client=other)
    bench.etcd.compact()
    bench.client.set_cut(False)
    bench.wait(2.0)
    assert [type(one) for one in bench.heard] == [WatchLost]


def test_a_watch_may_lose_or_double_events_but_keeps_their_order() -> None:
    bench = Bench(FAIR._replace(watch_lost=0.3, watch_doubled=0.3, watch_slow=0.3))
    bench.watch()
    for number in range(10, 60):
        bench.put(f"k{number}")
    bench.wait(10.0)
    heard = bench.heard_keys()
    assert heard == sorted(heard)
    assert 10 < len(set(heard)) < 50
    assert len(heard) > len(set(heard))


@pytest.mark.parametrize(
    ("leases", "left", "later"), [(Leases.KEPT, ["k1"], []), (Leases.LAPSED, [], []), (Leases.AGED, ["k1"], [])]
)
def test_a_cluster_that_was_away_keeps_its_leases_or_ends_them(
    leases: Leases, left: list[str], later: list[str]
) -> None:
    bench = Bench()
    lease = bench.ask(GrantLease(5))
    assert isinstance(lease, LeaseGranted)
    bench.put("k1", lease.lease)
    bench.etcd.stop(refuses=False)
    bench.wait(20.0)
    assert bench.names() == ["k1"]
    bench.etcd.start(leases)
    bench.wait(0.01)
    assert bench.names() == left
    bench.wait(5.5)
    assert bench.names() == later


def test_a_lease_ends_a_little_after_its_time_and_later_still_when_the_leader_changes() -> None:
    bench = Bench()
    lease = bench.ask(GrantLease(5)).lease
    bench.put("k1", lease)
    bench.wait(4.0)
    assert bench.ask(KeepAlive(lease)).ttl_s == 5
    bench.wait(4.9)
    bench.etcd.change_leader(1.5)
    bench.wait(6.0)
    assert bench.names() == ["k1"]
    bench.wait(1.0)
    assert bench.names() == []
    assert bench.ask(KeepAlive(lease)) == LeaseAlive(bench.etcd.keys.revision, 0)


def test_a_restore_goes_back_in_revisions() -> None:
    bench = Bench()
    bench.put("k1")
    bench.etcd.take_snapshot()
    bench.put("k2")
    before = bench.etcd.keys.revision
    bench.etcd.restore()
    assert bench.names() == ["k1"]
    assert bench.ask(Range("k1")).revision == before - 1
