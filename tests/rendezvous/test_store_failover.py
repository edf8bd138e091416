"""The store on a real cluster of three whose members are killed, stopped and restarted under it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.store import (
    GrantLease,
    KeepAlive,
    LeaseAlive,
    Put,
    Range,
    RangeAnswer,
    StoreError,
    Trouble,
    Txn,
    TxnAnswer,
)
from tests.etcd_cluster import EtcdCluster

from .balancer import Balancer
from .conftest import needs_etcd
from .owner import PATIENCE_S, Heard, Owner, sure

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def three() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(three: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members in good health, mended after the test."""
    yield three
    for i in range(3):
        three.mend(i)
    three.wait_healthy()


@pytest.fixture
def key() -> str:
    return f"/{uuid.uuid4().hex}/"


@pytest.fixture
def store(cluster: EtcdCluster, owner: Owner) -> Iterator[EtcdStore]:
    store = EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)
    owner.range(store, Range("a"))  # connected
    yield store
    store.close()


def in_use(store: EtcdStore, cluster: EtcdCluster) -> int:
    return cluster.endpoints.index(store.endpoint)


def write(owner: Owner, store: EtcdStore, key: str, number: int) -> None:
    """Put a number, as an agent does: what may have been done is looked up, never done again blindly."""
    value = str(number).encode()
    for _ in range(50):
        answer = owner.ask(store, Txn((), (Put(key, value),)), 1.0)
        if isinstance(answer, TxnAnswer):
            return
        error = sure(StoreError, answer)
        found = owner.ask(store, Range(key), 3.0)
        if error.maybe_done and isinstance(found, RangeAnswer) and found.kvs and found.kvs[0].value == value:
            return
    pytest.fail("no write came through")


def check_history(heard: Heard, written: list[int]) -> None:
    """Each number was heard, in order. Twice only where a write that timed out was found undone, and done again."""
    numbers = [int(change.value or b"-1") for change in heard.changes]
    revisions = [change.mod_revision for change in heard.changes]
    assert revisions == sorted(set(revisions)), "a revision was heard twice, or out of order"
    assert list(dict.fromkeys(numbers)) == written
    assert numbers == sorted(numbers)


def test_the_loss_of_the_member_in_use_costs_a_read_nothing_but_a_moment(
    cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str
) -> None:
    lease = owner.lease(store, 30)
    start = owner.put(store, key, b"0")
    heard = owner.watch(store, key, start)
    heard.until(1)
    lost = in_use(store, cluster)
    cluster.kill(lost)
    answer, took_s = owner.timed(store, Range(key))
    assert sure(RangeAnswer, answer).count == 1
    assert took_s < 5  # an election, where it was the leader
    assert sure(LeaseAlive, owner.ask(store, KeepAlive(lease))).ttl_s == 30
    assert in_use(store, cluster) != lost
    write(owner, store, key, 1)
    assert [change.value for change in heard.until(2)][:2] == [b"0", b"1"]


def test_a_stopped_member_is_left_within_two_tries_and_used_again_later(
    cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str
) -> None:
    """SIGSTOP: connections stay, answers do not come. Reads move on by themselves; a write says that it may be done."""
    start = owner.put(store, key, b"0")
    heard = owner.watch(store, key, start)
    writer = EtcdStore(EtcdSettings((store.endpoint, *cluster.endpoints)), owner.deliver)
    while writer.endpoint != store.endpoint:  # the order is random
        writer.close()
        writer = EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)
        owner.range(writer, Range(key))
    heard.until(1)
    stopped = in_use(store, cluster)
    if cluster.leader() == stopped:
        cluster.move_leader((stopped + 1) % 3)
    cluster.stop(stopped)
    answer, took_s = owner.timed(store, Range(key))
    assert sure(RangeAnswer, answer).count == 1
    assert 0.9 < took_s < 2.4
    error, took_s = owner.timed(writer, Txn((), (Put(key + "ambiguous", b""),)))
    assert sure(StoreError, error).maybe_done
    # gRPC pings a connection by itself after some answers; where it did so just now, it is the first to find out
    assert sure(StoreError, error).trouble in {Trouble.TIMEOUT, Trouble.UNREACHABLE}
    assert took_s < 2.4
    owner.put(writer, key, b"1")  # elsewhere
    assert [change.value for change in heard.until(2) if change.key == key] == [b"0", b"1"]
    cluster.cont(stopped)
    cluster.wait_healthy()
    for i in {0, 1, 2} - {stopped}:
        cluster.kill(i)
    cluster.restart((stopped + 1) % 3, wait=False)
    assert sure(RangeAnswer, owner.ask(store, Range(key))).count == 1
    writer.close()


def test_an_idle_watch_leaves_a_stopped_member(cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str) -> None:
    """Nothing else is asked of the store: HTTP/2's own pings must find out, 5 s and 2 s."""
    other = EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)
    start = owner.put(other, key, b"0")
    heard = owner.watch(store, key, start)
    heard.until(1)
    cluster.stop(in_use(store, cluster))
    began = time.monotonic()
    write(owner, other, key, 1)
    assert [change.value for change in heard.until(2)] == [b"0", b"1"]
    assert time.monotonic() - began < 12
    other.close()


def test_a_watch_loses_and_doubles_nothing_while_leaders_are_killed(
    cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str
) -> None:
    other = EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)
    heard = owner.watch(store, key, owner.put(other, key, b"0"))
    for number in range(1, 31):
        if number in {10, 20}:
            lost = cluster.leader()
            cluster.kill(lost)
        write(owner, other, key, number)
        if number in {15, 25}:
            cluster.restart(lost)
    owner.until(lambda: bool(heard.changes) and heard.changes[-1].value == b"30")
    check_history(heard, list(range(31)))
    other.close()


def test_the_whole_cluster_may_be_away_and_come_back(
    cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str
) -> None:
    lease = owner.lease(store, 60)
    heard = owner.watch(store, key, owner.put(store, key, b"0", lease))
    heard.until(1)
    for i in range(3):
        cluster.kill(i)
    answer, took_s = owner.timed(store, Txn((), (Put(key, b"lost"),)), 1.0)
    error = sure(StoreError, answer)
    assert took_s < 2
    assert error.trouble is Trouble.UNREACHABLE or error.maybe_done
    answers: list[object] = []
    store.request(Range(key), 20.0, answers.append)  # waits for them to come back
    for i in range(3):
        cluster.restart(i, wait=False)
    owner.until(lambda: bool(answers))
    assert isinstance(answers[0], RangeAnswer)
    write(owner, store, key, 1)
    owner.until(lambda: heard.changes[-1].value == b"1")
    assert heard.lost is None
    assert sure(LeaseAlive, owner.ask(store, KeepAlive(lease))).ttl_s == 60


def test_a_cluster_without_quorum_is_told_from_one_that_is_away(
    cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str
) -> None:
    cluster.kill(0)
    cluster.kill(1)
    deadline = time.monotonic() + PATIENCE_S
    while True:  # until the survivor has noticed
        answer, took_s = owner.timed(store, Txn((), (Put(key, b""),)), 0.8)
        error = sure(StoreError, answer)
        if error.trouble is Trouble.NO_QUORUM and not error.maybe_done:
            break
        assert time.monotonic() < deadline, error
    assert 0.7 < took_s < 1.8
    assert all(endpoint in error.sentence for endpoint in cluster.endpoints)
    assert "connection refused" in error.sentence
    assert sure(StoreError, owner.ask(store, GrantLease(5), 0.3)).trouble is Trouble.NO_QUORUM


def test_an_endpoint_that_cannot_be_resolved_or_reached_harms_no_other(cluster: EtcdCluster, owner: Owner) -> None:
    settings = EtcdSettings(("no-such-host.invalid:2379", "127.0.0.1:1", cluster.endpoints[0]))
    for _ in range(4):  # the order is random
        store = EtcdStore(settings, owner.deliver)
        heard = owner.watch(store, "/nothing", 1)
        answer, took_s = owner.timed(store, Range("a"))
        assert isinstance(answer, RangeAnswer)
        assert took_s < 2.5
        assert heard.lost is None
        store.close()


def test_a_thousand_watches_share_one_stream(cluster: EtcdCluster, store: EtcdStore, owner: Owner, key: str) -> None:
    start = owner.put(store, key) + 1
    heard = [owner.watch(store, f"{key}{i}/", start) for i in range(1000)]
    common = owner.watch(store, key, start)
    for first in range(0, 1000, 100):
        owner.txn(store, *(Put(f"{key}{i}/a", b"") for i in range(first, first + 100)))
    common.until(1000)
    owner.until(lambda: all(len(one.changes) == 1 for one in heard))
    cluster.kill(in_use(store, cluster))
    for first in range(0, 1000, 100):
        write(owner, store, f"{key}{first}/b", 0)
    owner.until(lambda: all(len(one.changes) >= 2 for one in heard[::100]))
    assert all(len(one.changes) == 1 for one in heard[1:100])


def test_a_stopped_member_behind_one_balanced_address_is_left(cluster: EtcdCluster, owner: Owner, key: str) -> None:
    """As behind a service of Kubernetes: the one endpoint leads to one member with each connection, in turn."""
    followers = [i for i in range(3) if i != cluster.leader()]
    with Balancer([cluster.endpoints[i] for i in followers]) as balancer:
        store = EtcdStore(EtcdSettings((balancer.endpoint,)), owner.deliver)
        heard = owner.watch(store, key, owner.put(store, key, b"0"))
        heard.until(1)
        time.sleep(0.3)  # gRPC pings after data, and would notice by that ping sooner than in a quiet connection
        cluster.stop(followers[balancer.connections - 1])
        answer, took_s = owner.timed(store, Range(key))
        assert sure(RangeAnswer, answer).count == 1
        assert 0.9 < took_s < 4
        write(owner, store, key, 1)
        assert [change.value for change in heard.until(2)] == [b"0", b"1"]
        store.close()
