"""Which address of this host the other nodes are told."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from dlaunch.agent.local_address import local_address
from dlaunch.errors import ConfigurationError, StoreUnreachable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("127.0.0.1:2379", {"127.0.0.1"}),
        ("127.9.9.9:2379", {"127.0.0.1"}),
        ("[::1]:2379", {"::1"}),
        ("localhost:2379", {"127.0.0.1", "::1"}),
    ],
)
def test_an_endpoint_on_this_host_means_loopback(endpoint: str, address: set[str]) -> None:
    assert local_address([endpoint], None) in address


def test_the_first_endpoint_that_can_be_found_decides() -> None:
    assert local_address(["no-such-host.invalid:1", "[::1]:1", "127.0.0.1:1"], None) == "::1"


def test_endpoints_that_cannot_be_found_are_named() -> None:
    with pytest.raises(StoreUnreachable) as raised:
        local_address(["no-such-host.invalid:1", f"{'x' * 300}:2"], None)
    assert "no-such-host.invalid:1 (" in str(raised.value)
    assert f"{'x' * 300}:2 (" in str(raised.value)


@pytest.mark.parametrize(
    ("wish", "address"), [("127.0.0.1", "127.0.0.1"), ("127.1.2.3", "127.1.2.3"), ("::1", "::1"), ("[::1]", "::1")]
)
def test_a_wish_that_is_an_address_of_this_host_is_fulfilled(wish: str, address: str) -> None:
    assert local_address(["no-such-host.invalid:1"], wish) == address


def test_a_wish_may_be_a_name() -> None:
    assert local_address([], "localhost") in {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("192.0.2.1", "--local-addr 192.0.2.1 is not an address of this host. Give"),
        ("2001:db8::1", "--local-addr 2001:db8::1 is not an address of this host. Give"),
        ("0.0.0.0", "is not an address of this host"),
        ("::", "is not an address of this host"),
        ("no-such-host.invalid", "cannot be resolved"),
        ("", "cannot be resolved"),
        ("x" * 300, "cannot be resolved"),
        ("127.0.0.1:5000", "cannot be resolved"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled_is_refused_in_words(wish: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        local_address(["127.0.0.1:1"], wish)
    assert words in str(raised.value)


@pytest.fixture
def host() -> Iterator[str]:
    """A host of its own with 10.77.1.1 and fd00:77::1 on its only network, and no way out of that."""
    name = f"dlaunch-{uuid4().hex[:8]}"
    commands = [
        f"ip netns add {name}",
        f"ip -n {name} link set lo up",
        f"ip -n {name} link add cable type veth peer name other",
        f"ip -n {name} address add 10.77.1.1/24 dev cable",
        f"ip -n {name} address add fd00:77::1/64 dev cable nodad",
        f"ip -n {name} link set cable up",
        f"ip -n {name} link set other up",
    ]
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (iproute2)")
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
            if done.returncode:
                pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def test_the_address_is_the_one_that_leads_to_the_endpoint(host: str) -> None:
    code = (
        "import sys\n"
        "from dlaunch.agent.local_address import local_address\n"
        "from dlaunch.errors import StoreUnreachable\n"
        "for endpoint in sys.argv[1:]:\n"
        "    try: print(local_address([endpoint], None))\n"
        "    except StoreUnreachable as error: print(error.sentence)\n"
    )
    own_name = socket.gethostname()
    endpoints = ["10.77.1.9:2379", "[fd00:77::9]:2379", "10.77.1.1:2379", "192.0.2.1:2379"]
    done = subprocess.run(
        ["ip", "netns", "exec", host, sys.executable, "-c", code, *endpoints, f"{own_name}:2379"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    towards, towards_v6, own, unreachable, by_name = done.stdout.splitlines()
    assert (towards, towards_v6, own) == ("10.77.1.1", "fd00:77::1", "10.77.1.1")
    assert "192.0.2.1:2379 (Network is unreachable)" in unreachable
    assert by_name
