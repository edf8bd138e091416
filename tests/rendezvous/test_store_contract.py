"""What every store does, checked on each: transactions, ranges, leases, watches, refusals, deadlines."""

from __future__ import annotations

import time

import pytest

from dlaunch.rendezvous.store import (
    MAX_OPERATIONS,
    MAX_REQUEST_BYTES,
    Change,
    Changes,
    Compare,
    Delete,
    GrantLease,
    KeepAlive,
    LeaseAlive,
    LeaseGranted,
    LeaseRevoked,
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
    TxnAnswer,
    WatchLost,
)

from .conftest import Bench
from .owner import absent, sure

# --- transactions ----------------------------------------------------------------------------------------------------


def test_a_key_is_created_once(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    create = Txn((absent(key),), (Put(key, b"mine"),), (Range(key),))
    first = sure(TxnAnswer, owner.ask(store, create))
    second = sure(TxnAnswer, owner.ask(store, create._replace(success=(Put(key, b"yours"),))))
    assert first.succeeded
    assert not second.succeeded
    assert [kv.value for kv in second.ranges[0].kvs] == [b"mine"]
    assert second.revision >= first.revision
    kv = second.ranges[0].kvs[0]
    assert kv.create_revision == kv.mod_revision == first.revision


def test_each_target_of_a_compare_decides_the_branch(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    lease = owner.lease(store, 30)
    created = owner.put(store, key, b"old")
    modified = owner.put(store, key, b"new", lease)
    holds = {
        Compare(key, Target.CREATE_REVISION, created): True,
        Compare(key, Target.CREATE_REVISION, modified): False,
        Compare(key, Target.MOD_REVISION, modified): True,
        Compare(key, Target.MOD_REVISION, created): False,
        Compare(key, Target.LEASE, lease): True,
        Compare(key, Target.LEASE, 0): False,
        Compare(key, Target.VALUE, b"new"): True,
        Compare(key, Target.VALUE, b"old"): False,
    }
    for compare, expected in holds.items():
        assert sure(TxnAnswer, owner.ask(store, Txn((compare,), ()))).succeeded is expected, compare
    together = Txn(tuple(compare for compare, holds_now in holds.items() if holds_now), ())
    assert sure(TxnAnswer, owner.ask(store, together)).succeeded
    assert not sure(TxnAnswer, owner.ask(store, Txn(tuple(holds), ()))).succeeded


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        (Target.CREATE_REVISION, 0, True),
        (Target.MOD_REVISION, 0, True),
        (Target.LEASE, 0, True),
        (Target.VALUE, b"", False),
    ],
)
def test_a_missing_key_has_revisions_and_lease_0_and_no_value(
    bench: Bench, target: Target, value: int | bytes, expected: bool
) -> None:
    answer = bench.owner.ask(bench.store, Txn((Compare(bench.key, target, value),), ()))
    assert sure(TxnAnswer, answer).succeeded is expected


def test_a_transaction_is_one_revision_and_reads_what_it_wrote(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    before = owner.put(store, key + "c", b"gone soon")
    answer = owner.txn(
        store,
        Range(key, prefix=True),
        Put(key + "a", b"1"),
        Put(key + "b", b"2"),
        Delete(key + "c"),
        Range(key, prefix=True),
    )
    assert answer.revision == before + 1
    assert [[kv.key for kv in found.kvs] for found in answer.ranges] == [[key + "c"], [key + "a", key + "b"]]
    assert {kv.mod_revision for kv in answer.ranges[1].kvs} == {answer.revision}


def test_a_transaction_that_changes_nothing_makes_no_revision(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    before = owner.put(store, key)
    assert owner.txn(store, Delete(key + "absent"), Delete(key + "none/", prefix=True)).revision == before


def test_deletion_by_prefix_spares_the_neighbours(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.txn(store, *(Put(key + name, b"") for name in ("a", "a/1", "a/2", "a0")))
    owner.txn(store, Delete(key + "a/", prefix=True))
    assert [kv.key for kv in owner.range(store, Range(key, prefix=True)).kvs] == [key + "a", key + "a0"]


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_a_range_is_in_order_and_says_how_much_it_left_out(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    names = ["é", "b", "a", "c", "\U0001f600", "~"]
    owner.txn(store, *(Put(key + name, name.encode()) for name in names))
    everything = owner.range(store, Range(key, prefix=True))
    assert [kv.key for kv in everything.kvs] == sorted(key + name for name in names)
    assert (everything.count, everything.more) == (6, False)
    cut = owner.range(store, Range(key, prefix=True, limit=2))
    assert [kv.key for kv in cut.kvs] == [key + "a", key + "b"]
    assert (cut.count, cut.more) == (6, True)
    assert not owner.range(store, Range(key, prefix=True, limit=6)).more


def test_keys_only_and_count_only_leave_the_rest_out(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.txn(store, Put(key + "a", b"value"), Put(key + "b", b"value"))
    keys = owner.range(store, Range(key, prefix=True, keys_only=True))
    assert [(kv.key, kv.value) for kv in keys.kvs] == [(key + "a", b""), (key + "b", b"")]
    assert keys.kvs[0].mod_revision == keys.revision
    assert owner.range(store, Range(key, prefix=True, count_only=True))[1:3] == ((), 2)


def test_a_range_with_an_end_excludes_it(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.txn(store, *(Put(key + name, b"") for name in "abcd"))
    found = owner.range(store, Range(key + "b", end=key + "d"))
    assert [kv.key for kv in found.kvs] == [key + "b", key + "c"]


def test_a_range_of_one_key_finds_that_key_only(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.txn(store, Put(key + "a", b"1"), Put(key + "ab", b"2"))
    assert [kv.value for kv in owner.range(store, Range(key + "a")).kvs] == [b"1"]
    assert owner.range(store, Range(key + "x"))[1:] == ((), 0, False)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_keys_go_with_their_lease_and_a_watch_sees_it(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    granted = sure(LeaseGranted, owner.ask(store, GrantLease(1)))
    created = owner.txn(store, Put(key + "a", b"", granted.lease), Put(key + "b", b"", granted.lease)).revision
    heard = owner.watch(store, key, created + 1)
    began = time.monotonic()
    changes = heard.until(2)
    assert time.monotonic() - began >= granted.ttl_s - 0.5
    revision = changes[0].mod_revision
    assert revision > created
    assert sorted(changes) == [Change(key + name, None, 0, revision) for name in "ab"]
    assert sure(LeaseAlive, owner.ask(store, KeepAlive(granted.lease))).ttl_s == 0
    error = sure(StoreError, owner.ask(store, Txn((), (Put(key, b"", granted.lease),))))
    assert (error.trouble, error.maybe_done) == (Trouble.NO_LEASE, False)


def test_a_renewed_lease_lives_on(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    granted = sure(LeaseGranted, owner.ask(store, GrantLease(1)))
    owner.put(store, key, b"", granted.lease)
    until = time.monotonic() + 1.5 * granted.ttl_s
    while time.monotonic() < until:  # as often as an agent does; the time must pass
        assert sure(LeaseAlive, owner.ask(store, KeepAlive(granted.lease))).ttl_s == granted.ttl_s
        time.sleep(granted.ttl_s / 4)
    assert owner.range(store, Range(key)).count == 1


def test_a_revoked_lease_takes_its_keys_in_one_revision(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    lease = owner.lease(store, 30)
    owner.put(store, key + "stays", b"", lease)
    owner.put(store, key + "stays", b"")  # a put without the lease takes the key off it
    before = owner.txn(store, Put(key + "a", b"", lease), Put(key + "b", b"", lease)).revision
    revoked = sure(LeaseRevoked, owner.ask(store, RevokeLease(lease)))
    assert revoked.revision == before + 1
    assert [kv.key for kv in owner.range(store, Range(key, prefix=True)).kvs] == [key + "stays"]
    assert sure(LeaseRevoked, owner.ask(store, RevokeLease(lease))).revision == revoked.revision


def test_a_transaction_whose_lease_is_gone_does_nothing_at_all(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    error = sure(StoreError, owner.ask(store, Txn((), (Put(key + "a", b""), Put(key + "b", b"", 4711)))))
    assert error.trouble is Trouble.NO_LEASE
    assert owner.range(store, Range(key, prefix=True)).count == 0
    unused = Txn((absent(key),), (Put(key, b""),), (Put(key, b"", 4711),))  # the branch not taken does not matter
    assert sure(TxnAnswer, owner.ask(store, unused)).succeeded


# --- watches ---------------------------------------------------------------------------------------------------------


def test_a_watch_hears_the_past_from_its_revision_and_then_the_present(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.put(store, key + "a", b"1")
    second = owner.put(store, key + "a", b"2")
    owner.put(store, key + "b", b"3")
    heard = owner.watch(store, key, second)
    heard.until(2)
    owner.txn(store, Delete(key + "a"))
    assert [(change.key, change.value) for change in heard.until(3)] == [
        (key + "a", b"2"),
        (key + "b", b"3"),
        (key + "a", None),
    ]
    assert [change.mod_revision for change in heard.changes] == [second, second + 1, second + 2]
    assert heard.changes[0].create_revision == second - 1


def test_a_watch_of_one_key_or_a_prefix_hears_no_other(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key + "before") + 1
    one = owner.watch(store, key + "a", start, prefix=False)
    room = owner.watch(store, key + "a/", start)
    owner.txn(store, *(Put(key + name, b"") for name in ("a", "a/1", "a0", "b")))
    owner.txn(store, *(Put(key + name, b"last") for name in ("a", "a/1")))
    assert [change.key for change in one.until(2)] == [key + "a"] * 2
    assert [change.key for change in room.until(2)] == [key + "a/1"] * 2


def test_a_transaction_is_heard_whole(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key) + 1
    heard = owner.watch(store, key, start)
    owner.txn(store, *(Put(f"{key}{i:03}", b"x" * 100) for i in range(100)))
    heard.until(1)
    assert [news.revision for news in heard.news if isinstance(news, Changes)] == [start]
    assert len(heard.changes) == 100


def test_a_cancelled_watch_hears_nothing_more(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key) + 1
    cancelled, other = owner.watch(store, key, start), owner.watch(store, key, start)
    owner.put(store, key, b"1")
    cancelled.until(1)
    assert cancelled.watch
    cancelled.watch.cancel()
    owner.put(store, key, b"2")
    other.until(2)
    assert len(cancelled.changes) == 1
    at_once = owner.watch(store, key, start)
    assert at_once.watch
    at_once.watch.cancel()  # perhaps before etcd has confirmed it
    owner.put(store, key, b"3")
    other.until(3)
    assert at_once.news == []


def test_a_watch_from_a_compacted_revision_is_lost(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key, b"1")
    owner.put(store, key, b"2")
    latest = owner.put(store, key, b"3")
    running = owner.watch(store, key, start)
    running.until(3)
    bench.compact(latest)
    lost = owner.watch(store, key, start)
    owner.until(lambda: bool(lost.news))
    assert isinstance(lost.news[0], WatchLost)
    assert "compacted" in lost.news[0].sentence
    owner.put(store, key, b"4")
    assert [change.value for change in running.until(4)] == [b"1", b"2", b"3", b"4"]
    assert len(lost.news) == 1


# --- refusals --------------------------------------------------------------------------------------------------------

TOO_MUCH: list[tuple[Operation, ...]] = [
    tuple(Put(f"{i}", b"") for i in range(MAX_OPERATIONS + 1)),
    (Put("a", b"x" * (MAX_REQUEST_BYTES + 1)),),
    tuple(Put(f"{i}", b"x" * (MAX_REQUEST_BYTES // 100)) for i in range(101)),
]


@pytest.mark.parametrize("operations", TOO_MUCH, ids=["operations", "value", "values"])
def test_what_is_too_large_is_refused_whole(bench: Bench, operations: tuple[Operation, ...]) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    moved = tuple(operation._replace(key=key + operation.key) for operation in operations)
    error = sure(StoreError, owner.ask(store, Txn((), moved)))
    assert (error.trouble, error.maybe_done, error.is_lasting) == (Trouble.TOO_LARGE, False, True)
    assert owner.range(store, Range(key, prefix=True)).count == 0


def test_what_is_as_large_as_allowed_is_taken(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    owner.txn(store, *(Put(f"{key}{i}", b"") for i in range(MAX_OPERATIONS)))
    owner.put(store, key, b"x" * (MAX_REQUEST_BYTES - 200))
    assert len(owner.range(store, Range(key)).kvs[0].value) == MAX_REQUEST_BYTES - 200


@pytest.mark.parametrize(
    "operations", [(Put("a", b"1"), Put("a", b"2")), (Put("a/1", b""), Delete("a/", prefix=True)), (Put("", b""),)]
)
def test_a_transaction_that_contradicts_itself_is_refused(bench: Bench, operations: tuple[Operation, ...]) -> None:
    error = sure(StoreError, bench.owner.ask(bench.store, Txn((), operations)))
    assert (error.trouble, error.maybe_done) == (Trouble.OTHER, False)


# --- callbacks and deadlines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_", [Range("a"), Txn((), (Put("a", b""),)), GrantLease(5)], ids=["read", "write", "grant"]
)
def test_a_call_to_an_unreachable_store_ends_in_time(bench: Bench, request_: Request) -> None:
    answer, took_s = bench.owner.timed(bench.unreachable(), request_, 0.5)
    assert sure(StoreError, answer).trouble in {Trouble.UNREACHABLE, Trouble.TIMEOUT}
    assert 0.4 < took_s < 1.5
    assert not sure(StoreError, answer).maybe_done


def test_callbacks_come_by_the_owner_only(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key)
    answers: list[object] = []
    store.request(Range(key), 10, answers.append)
    store.watch(key, prefix=True, from_revision=start, heard=answers.append)
    store.request(Txn((), (Put("", b""),)), 10, answers.append)  # refused without asking anybody
    posted = [owner.posted.get(timeout=10) for _ in range(3)]
    assert answers == []
    for call in posted:
        call()
    assert {type(answer) for answer in answers} == {RangeAnswer, Changes, StoreError}


def test_nothing_is_called_after_close(bench: Bench) -> None:
    store, owner, key = bench.store, bench.owner, bench.key
    start = owner.put(store, key)
    answers: list[object] = []
    store.request(Range(key), 10, answers.append)
    store.watch(key, prefix=True, from_revision=start, heard=answers.append)
    posted = [owner.posted.get(timeout=10) for _ in range(2)]
    store.request(Range(key), 10, answers.append)  # on its way
    store.close()
    while not owner.posted.empty():
        posted.append(owner.posted.get())
    for call in posted:
        call()
    assert answers == []
    store.close()  # twice is no mistake
