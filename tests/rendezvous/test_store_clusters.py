"""Endpoints of different etcd clusters: agents that met in two would make two runs of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.store import Put, Range, RangeAnswer, StoreError, Trouble, Txn, TxnAnswer
from tests.etcd_cluster import EtcdCluster

from .balancer import Balancer
from .conftest import needs_etcd
from .owner import Owner, sure
from .strangers import Stranger, silence

pytestmark = needs_etcd
Open = Callable[..., EtcdStore]


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[EtcdCluster, EtcdCluster]]:
    """Two clusters of one member each."""
    with ExitStack() as stack:
        yield stack.enter_context(EtcdCluster()), stack.enter_context(EtcdCluster())


@pytest.fixture
def open_store(owner: Owner) -> Iterator[Open]:
    stores: list[EtcdStore] = []

    def open_one(*endpoints: str, try_s: float = 1.0) -> EtcdStore:
        stores.append(EtcdStore(EtcdSettings(endpoints, try_s=try_s), owner.deliver))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def count(cluster: EtcdCluster, key: str) -> int:
    owner = Owner()
    store = EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)
    try:
        return owner.range(store, Range(key, count_only=True)).count
    finally:
        store.close()


def test_endpoints_of_two_clusters_are_refused_at_once_and_nothing_is_written(
    two: tuple[EtcdCluster, EtcdCluster], owner: Owner, open_store: Open
) -> None:
    endpoints = [*two[0].endpoints, *two[1].endpoints]
    for _ in range(4):  # the order is random
        store = open_store(*endpoints)
        answer, took_s = owner.timed(store, Txn((), (Put("/two", b""),)))
        error = sure(StoreError, answer)
        assert (error.trouble, error.is_lasting, error.maybe_done) == (Trouble.WRONG_SERVER, True, False)
        assert error.sentence.startswith("The endpoints are of 2 different clusters of etcd: ")
        assert all(endpoint in error.sentence for endpoint in endpoints)
        assert took_s < 4
        assert isinstance(owner.ask(store, Range("/two")), StoreError)  # nor is it used later
    assert [count(cluster, "/two") for cluster in two] == [0, 0]


def test_an_endpoint_of_another_cluster_that_comes_later_is_left_alone(owner: Owner, open_store: Open) -> None:
    """It was down at first. When it is up and ours is not, it must not be taken for ours."""
    with EtcdCluster() as ours, EtcdCluster() as other:
        other.kill(0)
        store = open_store(*ours.endpoints, *other.endpoints, try_s=0.5)
        assert isinstance(owner.ask(store, Txn((), (Put("/later", b""),))), TxnAnswer)
        heard = owner.watch(store, "/later", 1)
        heard.until(1)
        other.restart(0)
        ours.kill(0)
        assert "it is of the cluster" in sure(StoreError, owner.ask(store, Range("/later"), 3.0)).sentence
        error = sure(StoreError, owner.ask(store, Txn((), (Put("/later/2", b""),)), 3.0))
        assert not error.maybe_done
        assert "it is of the cluster" in error.sentence
        assert not error.is_lasting  # ours may come back
        assert count(other, "/later/2") == 0
        ours.restart(0)
        assert isinstance(owner.ask(store, Txn((), (Put("/later/2", b""),))), TxnAnswer)
        assert [change.key for change in heard.until(2)] == ["/later", "/later/2"]


def test_a_name_that_leads_to_two_clusters_is_refused(
    two: tuple[EtcdCluster, EtcdCluster], owner: Owner, open_store: Open
) -> None:
    """A balancer before both: only the answers tell them apart."""
    with Balancer([*two[0].endpoints, *two[1].endpoints]) as balancer:
        store = open_store(balancer.endpoint)
        assert isinstance(owner.ask(store, Range("k")), RangeAnswer)
        assert balancer.connections == 1
        two[0].kill(0)
        try:
            error = sure(StoreError, owner.ask(store, Range("k")))
        finally:
            two[0].restart(0)
    assert error.sentence.startswith("Another etcd answers: ")
    assert error.trouble is Trouble.WRONG_SERVER


def test_the_same_cluster_after_a_restart_is_no_stranger(owner: Owner, open_store: Open) -> None:
    with EtcdCluster(3) as cluster:
        store = open_store(*cluster.endpoints)
        assert isinstance(owner.ask(store, Txn((), (Put("/same", b""),))), TxnAnswer)
        for member in range(3):
            cluster.kill(member)
        for member in range(3):
            cluster.restart(member, wait=False)
        cluster.wait_healthy()
        assert owner.range(store, Range("/same")).count == 1


def test_a_cluster_with_users_tells_which_it_is(owner: Owner, open_store: Open) -> None:
    with EtcdCluster(arguments=("--bcrypt-cost=4",)) as guarded:
        guarded.post(0, "auth/user/add", {"name": "root", "password": "x"})
        guarded.post(0, "auth/user/grant", {"user": "root", "role": "root"})
        guarded.post(0, "auth/enable", {})
        names = (*guarded.endpoints, guarded.endpoints[0].replace("127.0.0.1", "localhost"))
        store = EtcdStore(EtcdSettings(names, user="root", password="x"), owner.deliver)
        try:
            heard = owner.watch(store, "/users", 1)
            owner.put(store, "/users", b"1")
            assert [change.value for change in heard.until(1)] == [b"1"]
        finally:
            store.close()
        error = sure(StoreError, owner.ask(open_store(*names), Range("/users")))
        assert error.trouble is Trouble.DENIED
        assert "asks for a user" in error.sentence


def test_an_endpoint_that_says_nothing_delays_the_first_request_by_half_a_try_only(
    two: tuple[EtcdCluster, EtcdCluster], owner: Owner, open_store: Open
) -> None:
    with Stranger(silence) as silent:
        answer, took_s = owner.timed(open_store(*two[0].endpoints, silent.endpoint, try_s=0.5), Range("k"))
    assert isinstance(answer, RangeAnswer)
    assert took_s < 3
