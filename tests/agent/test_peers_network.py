"""Agents on hosts of their own (network namespaces): a network that is silent, or that refuses, proves nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple
from uuid import uuid4

import pytest

from .peer_world import PATIENCE_S, ROOT, Process, in_time

ANNA, BERT = "10.77.0.1", "10.77.0.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE_S)


class Network(NamedTuple):
    """Two hosts with a cable between them."""

    anna: str  # names of the namespaces
    bert: str

    def run_on(self, host: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", host)

    def cable(self, state: str) -> None:
        ip("-n", self.bert, "link", "set", "cable", state)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (iproute2)")
    made = Network(*(f"dlaunch-{uuid4().hex[:8]}-{name}" for name in ("anna", "bert")))
    with ExitStack() as stack:
        for host in made:
            try:
                ip("netns", "add", host)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
            stack.callback(ip, "netns", "delete", host)
        try:
            ip("-n", made.anna, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", made.bert)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs virtual network cables (veth): {error.stderr.strip()}")
        for host, address in zip(made, (ANNA, BERT), strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield made


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def start(*arguments: str, prefix: tuple[str, ...]) -> Process:
            started = Process(*arguments, prefix=prefix, SHORT_TIMES="1")
            stack.callback(started.end)
            return started

        yield start


def test_silence_is_no_proof_but_what_comes_after_it_may_be(network: Network, process: Callable[..., Process]) -> None:
    bert = process(BERT, "bert", prefix=network.run_on(network.bert))
    anna = process(ANNA, "anna", "bert", bert.address, prefix=network.run_on(network.anna))
    assert anna.tells("connected") == ["connected", True]
    bert.tells("said")

    network.cable("down")
    assert anna.tells("connected") == ["connected", False]
    network.cable("up")
    assert anna.tells("connected") == ["connected", True]  # and not gone

    network.cable("down")
    bert.signal(signal.SIGKILL)
    assert anna.tells("connected") == ["connected", False]
    assert not in_time(anna.has_told, 1.0)
    network.cable("up")
    assert anna.tells("gone") == ["gone", "bert"]


# Answers every TCP packet for an address that is not its own as a firewall or a router would: by ICMP.
FIREWALL = """
import socket, struct
sniffed = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
print("ready", flush=True)
while True:
    packet = sniffed.recv(2000)
    if packet[9] == socket.IPPROTO_TCP and packet[16:19] == bytes([10, 88, 0]):
        message = struct.pack(">BBHI", 3, 3, 0, 0) + packet[:28]
        total = sum(struct.unpack(f">{len(message) // 2}H", message))
        total = (total & 0xFFFF) + (total >> 16)
        total += total >> 16
        raw.sendto(message[:2] + struct.pack(">H", ~total & 0xFFFF) + message[4:], (socket.inet_ntoa(packet[12:16]), 0))
"""
REACH = """
import select, socket, sys
from dlaunch.agent.peer_connection import how_failed, reach
for address in sys.argv[1:]:
    sock, how = reach(address)
    if sock:
        assert select.select([], [sock], [], 30)[1]
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        how = how_failed(sock, code)
        print(code, how.value)
"""


def test_a_firewalls_refusal_is_told_from_a_hosts(network: Network) -> None:
    ip("-n", network.anna, "route", "add", "10.88.0.0/24", "via", BERT)
    python = [sys.executable, "-c"]
    with subprocess.Popen([*network.run_on(network.bert), *python, FIREWALL], stdout=subprocess.PIPE) as firewall:
        try:
            assert firewall.stdout
            assert firewall.stdout.readline() == b"ready\n"
            done = subprocess.run(
                [*network.run_on(network.anna), *python, REACH, f"{BERT}:5000", "10.88.0.1:5000"],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        finally:
            firewall.kill()
    assert done.stdout.splitlines() == ["111 refused", "111 silent"]  # the same error number
