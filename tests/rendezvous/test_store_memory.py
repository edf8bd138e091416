"""The store in memory: its pure state, what a simulator needs of it, and that it is etcd's double."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.memory import MemoryKeys, MemoryStore, SharedKeys
from dlaunch.rendezvous.store import (
    Answer,
    Changes,
    Compare,
    Delete,
    GrantLease,
    KeepAlive,
    LeaseAlive,
    LeaseGranted,
    Operation,
    Put,
    Range,
    RangeAnswer,
    Request,
    RevokeLease,
    StoreError,
    Target,
    Trouble,
    Txn,
    WatchLost,
)
from tests.etcd_cluster import EtcdCluster

from .conftest import needs_etcd
from .owner import Owner, sure

# --- leases on a clock that the test owns ----------------------------------------------------------------------------


def granted(keys: MemoryKeys, ttl_s: int, now: float) -> int:
    return sure(LeaseGranted, keys.apply(GrantLease(ttl_s), now)).lease


def ttl(keys: MemoryKeys, lease: int, now: float) -> int:
    return sure(LeaseAlive, keys.apply(KeepAlive(lease), now)).ttl_s


def count(keys: MemoryKeys) -> int:
    return sure(RangeAnswer, keys.apply(Range("", prefix=True), 0)).count


def test_a_lease_ends_at_its_time_and_not_before() -> None:
    keys = MemoryKeys()
    lease = granted(keys, 5, now=10)
    keys.apply(Txn((), (Put("a", b"", lease), Put("b", b"", lease))), 10)
    assert keys.next_expiry() == 15
    assert keys.expire(14.999) == ()
    assert count(keys) == 2
    assert keys.expire(15) == (lease,)
    assert count(keys) == 0
    assert keys.next_expiry() is None
    assert keys.revision == 3


def test_leases_end_in_the_order_of_their_ends_after_renewals() -> None:
    keys = MemoryKeys()
    first, second, third = (granted(keys, 5, now=at) for at in (0, 1, 2))
    assert ttl(keys, first, now=4) == 5
    keys.apply(RevokeLease(second), 4)
    assert keys.next_expiry() == 7
    assert keys.expire(100) == (third, first)


def test_a_lease_that_is_renewed_too_late_is_gone_even_where_nobody_has_ended_it() -> None:
    keys = MemoryKeys()
    lease = granted(keys, 5, now=0)
    keys.apply(Txn((), (Put("a", b"", lease),)), 0)
    assert ttl(keys, lease, now=5) == 0
    assert count(keys) == 0


def test_a_new_leader_gives_every_lease_its_time_again() -> None:
    keys = MemoryKeys()
    lease = granted(keys, 5, now=0)
    keys.extend_leases(4)
    assert keys.next_expiry() == 9
    assert keys.expire(8.9) == ()
    assert keys.expire(9) == (lease,)


def test_the_floor_of_a_lease_is_that_of_etcd() -> None:
    assert sure(LeaseGranted, MemoryKeys().apply(GrantLease(1), 0)).ttl_s == 2


# --- history and snapshots -------------------------------------------------------------------------------------------


def written(keys: MemoryKeys, *names: str) -> None:
    for name in names:
        keys.apply(Txn((), (Put(name, name.encode()),)), 0)


def test_changes_are_found_from_any_revision_that_was_not_compacted() -> None:
    keys = MemoryKeys()
    written(keys, "a", "b", "a/1", "a")
    everything = sure(Changes, keys.changes_since(0, "", True))
    assert (everything.revision, [change.mod_revision for change in everything.changes]) == (5, [2, 3, 4, 5])
    assert [change.mod_revision for change in sure(Changes, keys.changes_since(3, "a", True)).changes] == [4, 5]
    assert [change.mod_revision for change in sure(Changes, keys.changes_since(3, "a", False)).changes] == [5]
    assert keys.changes_since(6, "a", True) == Changes(5, ())
    keys.compact(4)
    assert isinstance(keys.changes_since(3, "a", True), WatchLost)
    assert len(sure(Changes, keys.changes_since(4, "a", True)).changes) == 2
    keys.compact(100)
    assert keys.compacted == 5


def test_a_snapshot_does_not_change_with_what_it_was_taken_of() -> None:
    keys = MemoryKeys()
    lease = granted(keys, 5, now=0)
    keys.apply(Txn((), (Put("a", b"1", lease),)), 0)
    before = keys.copy()
    written(keys, "a", "b")
    keys.expire(100)
    assert before.revision == 2
    assert sure(RangeAnswer, before.apply(Range("", prefix=True), 0)).kvs[0].lease == lease
    assert before.expire(5) == (lease,)
    assert count(before) == 0
    assert count(keys) == 2


def test_stores_share_keys_and_one_that_is_cut_off_catches_up(owner: Owner) -> None:
    shared = SharedKeys()
    one, other = MemoryStore(owner.deliver, shared), MemoryStore(owner.deliver, shared)
    heard = owner.watch(other, "a", 1)
    other.cut()
    owner.put(one, "a", b"1")
    error = sure(StoreError, owner.ask(other, Range("a"), 0.1))
    assert error.trouble is Trouble.TIMEOUT
    assert heard.news == []
    other.heal()
    assert [change.value for change in heard.until(1)] == [b"1"]
    one.close()
    other.close()


# --- etcd's double ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


class Requests:
    """Random requests about few keys, so that they meet."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.leases: list[tuple[int, int]] = []  # as each of the two stores has named them
        self.revision = 1

    def key(self) -> str:
        return "/" + "".join(self._rng.choices("ab/", k=self._rng.randrange(4)))

    def operation(self, which: int, seed: int) -> Operation:
        rng = random.Random(seed)
        keys = ["/" + "".join(rng.choices("ab/", k=rng.randrange(4))) for _ in range(2)]
        match rng.randrange(5):
            case 0:
                return Range(keys[0], prefix=rng.random() < 0.5, limit=rng.randrange(3), keys_only=rng.random() < 0.3)
            case 1:
                return Range(keys[0], end=keys[1], count_only=rng.random() < 0.3)
            case 2:
                return Delete(keys[0], prefix=rng.random() < 0.3)
            case _:
                pair = rng.choice([*self.leases, (0, 0), (999, 999)])
                return Put(keys[0], bytes([rng.randrange(256)]), pair[which])

    def both(self) -> tuple[Request, Request]:
        """The same request for memory and for etcd."""
        rng = self._rng
        kind = rng.randrange(12)
        if kind == 0:
            return GrantLease(60), GrantLease(60)
        if kind == 1 and self.leases:
            pair = rng.choice(self.leases)
            if rng.random() < 0.5:
                return RevokeLease(pair[0]), RevokeLease(pair[1])
            return KeepAlive(pair[0]), KeepAlive(pair[1])
        compares = tuple(self._compare() for _ in range(rng.randrange(3)))
        seeds = [[rng.randrange(1 << 30) for _ in range(rng.randrange(4))] for _ in range(2)]
        memory, etcd = (
            Txn(compares, *(tuple(self.operation(which, seed) for seed in branch) for branch in seeds))
            for which in (0, 1)
        )
        return memory, etcd

    def _compare(self) -> Compare:
        target = self._rng.choice([Target.CREATE_REVISION, Target.MOD_REVISION, Target.VALUE])
        if target is Target.VALUE:
            return Compare(self.key(), target, bytes([self._rng.randrange(256)]))
        return Compare(
            self.key(), target, self._rng.choice([0, self.revision, self._rng.randrange(1, self.revision + 1)])
        )


def comparable(answer: Answer | StoreError, leases: dict[int, int]) -> object:
    """An answer without the names of leases, which differ, and without the words of errors."""
    if isinstance(answer, StoreError):
        return answer.trouble, answer.maybe_done
    if isinstance(answer, LeaseGranted):
        return answer.revision, answer.ttl_s
    if isinstance(answer, RangeAnswer):
        return answer._replace(kvs=tuple(kv._replace(lease=leases.get(kv.lease, kv.lease)) for kv in answer.kvs))
    ranges = getattr(answer, "ranges", None)
    return answer if ranges is None else (answer[:2], [comparable(found, leases) for found in ranges])


@needs_etcd
@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_requests_get_the_same_answers_from_memory_and_from_etcd(
    seed: int, fresh: EtcdCluster, owner: Owner
) -> None:
    """Down to the revisions, as both begin at 1 and nobody else writes; and both tell the same history."""
    etcd = EtcdStore(EtcdSettings(fresh.endpoints), owner.deliver)
    keys, requests = MemoryKeys(), Requests(seed)
    taken = 0
    for _ in range(400):
        for_memory, for_etcd = requests.both()
        expected, found = keys.apply(for_memory, 0.0), owner.ask(etcd, for_etcd)
        names = {theirs: ours for ours, theirs in requests.leases}
        assert comparable(found, names) == comparable(expected, {}), for_memory
        if isinstance(expected, LeaseGranted):
            requests.leases.append((expected.lease, sure(LeaseGranted, found).lease))
        taken += not isinstance(expected, StoreError)
        requests.revision = keys.revision
    assert taken > 200
    for key, prefix in (("", True), ("/a", True), ("/a", False)):
        history = sure(Changes, keys.changes_since(1, key, prefix)).changes
        heard = owner.watch(etcd, key, 1, prefix=prefix)
        changes = heard.until(len(history))
        names = {theirs: ours for ours, theirs in requests.leases}
        assert [change._replace(lease=names.get(change.lease, 0)) for change in changes] == list(history)
    etcd.close()
