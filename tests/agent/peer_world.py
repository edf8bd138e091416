"""Agents that talk to each other in tests: some in this process, step by step, some in processes of their own."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from dlaunch.agent.peers import Peers
from dlaunch.clock import now
from dlaunch.rendezvous.values import Peer
from tests.worker.marked import VARIABLE, marked, new_mark

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
TOKEN = "secret"


class Node:
    """An agent's peers, and what they told."""

    def __init__(self, name: str, token: str = TOKEN, host: str = "127.0.0.1") -> None:
        self.selector = selectors.DefaultSelector()
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.gone: list[str] = []
        self.peers = Peers(self.selector, lambda sender, message: self.said.append((sender, message)), self.gone.append)
        self.peer = Peer(name, self.peers.open(host))
        self.peers.set_identity(token, name)

    def step(self, at_most_s: float) -> None:
        due_at = self.peers.due_at
        timeout = at_most_s if due_at is None else min(at_most_s, max(0.0, due_at - now()))
        for key, _mask in self.selector.select(timeout):
            if self.selector.get_map().get(key.fd) is key:
                key.data(key.fd)
        self.peers.tick(now())

    @property
    def sockets(self) -> int:
        return len(self.selector.get_map()) - 1  # without the listener

    def connection(self) -> socket.socket:
        """The only one."""
        (key,) = [key for key in self.selector.get_map().values() if key.fileobj is not self.peers.listener]
        assert isinstance(key.fileobj, socket.socket)
        return key.fileobj

    def close(self) -> None:
        self.peers.close()
        assert len(self.selector.get_map()) == 0
        self.selector.close()


def until(condition: Callable[[], object], *nodes: Node) -> None:
    """Let the nodes do what they have to, until something is so."""
    deadline = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < deadline, [(each.peer.node_id, each.said, each.gone, each.sockets) for each in nodes]
        for each in nodes:
            each.step(0.005)


def for_a_while(seconds: float, *nodes: Node) -> None:
    """For what must not happen: there is no event to wait for."""
    deadline = monotonic() + seconds
    until(lambda: monotonic() >= deadline, *nodes)


class Process:
    """An agent in a process of its own, to be stopped and killed."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> None:
        self.mark = new_mark()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.agent.peer_process", *arguments],
            cwd=ROOT,
            env={**os.environ, VARIABLE: self.mark, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        _, self.address, self.below = self.tells("address")
        self.peer = Peer(arguments[1], self.address)

    def tells(self, kind: str) -> list[Any]:
        """The next line, which must be of this kind."""
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], f"not told: {kind}"
        line: list[Any] = json.loads(self.process.stdout.readline())
        assert line[0] == kind, line
        return line

    def has_told(self) -> bool:
        """Whether there is something to read."""
        return bool(select.select([self.process.stdout.fileno()], [], [], 0)[0]) if self.process.stdout else False

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout
        self.process.stdout.close()
        for pid in marked(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_time(condition: Callable[[], object], seconds: float) -> bool:
    """Whether something becomes so within a time: for what must not."""
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
