"""What listens at an endpoint is not etcd, or says little: one sentence that names it, in the time that was given."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc  # type: ignore[import-untyped]
import pytest

from dlaunch.errors import UsageError
from dlaunch.rendezvous.endpoints import Endpoint, parse_endpoint
from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore
from dlaunch.rendezvous.store import Put, Range, RangeAnswer, StoreError, Trouble, Txn
from tests.etcd_cluster import EtcdCluster, free_ports

from .owner import Owner, sure
from .strangers import Speak, Stranger, garbage, hanging_up, silence, ssh_server, web_server


@pytest.fixture
def ask(owner: Owner) -> Iterator[Callable[..., tuple[StoreError, float]]]:
    stores: list[EtcdStore] = []

    def ask_one(*endpoints: str, timeout_s: float = 10.0) -> tuple[StoreError, float]:
        stores.append(EtcdStore(EtcdSettings(endpoints), owner.deliver))
        answer, took_s = owner.timed(stores[-1], Txn((), (Put("k", b""),)), timeout_s)
        error = sure(StoreError, answer)
        assert not error.maybe_done, error.sentence
        assert error.sentence.endswith(".")
        assert "\n" not in error.sentence
        assert all(endpoint in error.sentence for endpoint in endpoints)
        return error, took_s

    yield ask_one
    for store in stores:
        store.close()


Ask = Callable[..., tuple[StoreError, float]]


@pytest.mark.parametrize(
    ("speak", "words"),
    [
        (web_server, "web server"),
        (ssh_server, "SSH server"),
        (garbage, "does not speak HTTP/2"),
        (hanging_up, "closes"),
    ],
)
def test_a_server_of_another_kind_is_named_long_before_the_time_is_up(ask: Ask, speak: Speak, words: str) -> None:
    stranger = Stranger(speak)
    error, took_s = ask(stranger.endpoint)
    stranger.close()
    assert error.trouble is Trouble.WRONG_SERVER
    assert words in error.sentence
    assert took_s < 4


def test_a_grpc_server_that_is_not_etcd_is_named(ask: Ask) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    error, took_s = ask(f"127.0.0.1:{port}")
    server.stop(None)
    assert error.trouble is Trouble.WRONG_SERVER
    assert "not etcd" in error.sentence
    assert took_s < 4


def test_a_silent_listener_uses_the_time_up_and_no_more(ask: Ask) -> None:
    stranger = Stranger(silence)
    error, took_s = ask(stranger.endpoint, timeout_s=1.5)
    stranger.close()
    assert error.trouble is Trouble.TIMEOUT
    assert "says nothing" in error.sentence
    assert 1.4 < took_s < 2.5


def test_nobody_there_is_refused_for_as_long_as_was_asked(ask: Ask) -> None:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    error, took_s = ask(endpoint, timeout_s=0.7)
    assert error == StoreError(
        Trouble.UNREACHABLE, f"etcd cannot be reached within 0.7 s: {endpoint}: connection refused."
    )
    assert 0.6 < took_s < 1.7


def test_a_name_that_does_not_exist_is_named(ask: Ask) -> None:
    error, took_s = ask("no-such-host.invalid:2379", timeout_s=1.0)
    assert error.trouble is Trouble.UNREACHABLE
    assert "resolved" in error.sentence or "in time" in error.sentence  # a slow resolver
    assert took_s < 2


def test_different_troubles_are_told_for_each_endpoint(ask: Ask) -> None:
    stranger = Stranger(web_server)
    closed = [f"127.0.0.1:{port}" for port in free_ports(2)]
    error, _ = ask(stranger.endpoint, *closed, timeout_s=1.0)
    stranger.close()
    assert error.trouble is Trouble.UNREACHABLE
    assert error.sentence.count("connection refused") == 1
    assert "web server" in error.sentence


def test_strangers_among_the_endpoints_do_no_harm(etcd: EtcdCluster, owner: Owner) -> None:
    strangers = [Stranger(speak) for speak in (web_server, silence, garbage)]
    endpoints = (*(stranger.endpoint for stranger in strangers), *etcd.endpoints)
    for _ in range(3):  # the order is random
        store = EtcdStore(EtcdSettings(endpoints, try_s=0.5), owner.deliver)
        answer, took_s = owner.timed(store, Range("a"))
        assert isinstance(answer, RangeAnswer)
        assert took_s < 3
        owner.put(store, "/strangers")
        store.close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_address_of_ipv6_is_connected_to(ask: Ask) -> None:
    try:
        stranger = Stranger(ssh_server, socket.AF_INET6)
    except OSError:
        pytest.skip("no ::1 here")
    error, _ = ask(stranger.endpoint)
    stranger.close()
    assert "SSH server" in error.sentence


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1", Endpoint("node1", 2379)),
        ("node1.example.org:23790", Endpoint("node1.example.org", 23790)),
        ("10.0.0.1:1", Endpoint("10.0.0.1", 1)),
        ("[fe80::1]:2379", Endpoint("fe80::1", 2379)),
        ("[::1]", Endpoint("::1", 2379)),
        (" node1:1 ", Endpoint("node1", 1)),
    ],
)
def test_an_endpoint_is_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["", "a:0", "a:65536", "a:b", "::1", "http://a:1", "a b", "user@a", "a:1,b:2", "a:-1"])
def test_what_is_no_endpoint_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        parse_endpoint(text)


def test_grpc_is_silent_and_leaves_no_variable_behind() -> None:
    """Nothing on stderr while endpoints fail, nothing for workers to inherit, and the process ends without `close`."""
    code = (
        "import os, queue, sys\n"
        "before = dict(os.environ)\n"
        "from dlaunch.rendezvous.etcd import EtcdSettings, EtcdStore\n"
        "from dlaunch.rendezvous.store import Range\n"
        "assert dict(os.environ) == before\n"
        "posted = queue.Queue()\n"
        "store = EtcdStore(EtcdSettings(('127.0.0.1:1', 'no-such-host.invalid:1')), posted.put)\n"
        "store.watch('a', prefix=True, from_revision=1, heard=print)\n"
        "store.request(Range('a'), 0.5, lambda answer: print(answer.trouble.value))\n"
        "posted.get(timeout=20)()\n"
        "assert dict(os.environ) == before\n"
        "print(*sorted({'etcd3', 'tenacity', 'six', 'torch', 'psutil'} & set(sys.modules)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["unreachable"]
