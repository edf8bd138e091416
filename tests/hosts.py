"""Hosts of a small network on one machine: network namespaces on a bridge, each with its own address and host name.

    with Hosts(("a", "b", "e0")) as hosts:
        subprocess.Popen([*hosts["a"].prefix, "dlaunch", ...])
        hosts.cut("a", "e0")      # silence: packets vanish, nobody is told
        hosts.mend("a", "e0")

A host is a process that waits in namespaces of its own (network and host name); others enter them with nsenter(1). All
of it goes when the process that made it ends, however it ends. Where this process may not make namespaces, they are
made inside a user namespace; where that is forbidden too, `NoHosts` says why.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from types import TracebackType
from typing import Any, NamedTuple

from tests.etcd_cluster import EtcdCluster

PATIENCE_S = 30.0
NETWORK = "10.87.3"
INTERFACE = "eth0"
NOBODY = "02:00:00:00:00:99"  # an Ethernet address that no interface has: what is sent there vanishes
TOOLS = ("ip", "nsenter", "unshare", "hostname")
CLIENT_PORT, PEER_PORT = 2379, 2380
WAITS = 'hostname "$0" && ip link set lo up && echo ready && read -r _'  # until its stdin is closed
IN_NAMESPACES = ("--net", "--uts")


class NoHosts(Exception):
    """No namespaces can be made here; the message says why."""


class Host(NamedTuple):
    """A place to start processes in."""

    name: str
    address: str
    prefix: tuple[str, ...]  # before a command that is to run there; the process id stays that of the command


class Hosts:
    """A network of hosts that can be cut off from one another."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._hosts: dict[str, Host] = {}
        self._stack = ExitStack()
        self._user: tuple[str, ...] = ()  # flags that enter the user namespace, where there is one

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def cut(self, one: str, *others: str) -> None:
        """From now on nothing that one sends reaches the others, and nothing of theirs reaches it."""
        for other in others:
            for here, there in ((one, other), (other, one)):
                self._ip(here, "neigh", "replace", self[there].address, *_to(NOBODY), "nud", "permanent")

    def mend(self, one: str, *others: str) -> None:
        """Undo a cut, if there is one."""
        for other in others:
            for here, there in ((one, other), (other, one)):
                self._ip(here, "neigh", "flush", "to", self[there].address, "dev", INTERFACE, "nud", "permanent")

    def unplug(self, name: str) -> None:
        """Pull a host's cable."""
        self._ip("", "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        """Put it in again."""
        self._ip("", "link", "set", f"to-{name}", "up")

    # --- making them -----------------------------------------------------------------------------------------------

    def _make(self) -> None:
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise NoHosts(f"there is no {missing[0]} command here")
        switch = self._make_switch()
        self._ip("", "link", "add", "bridge", "type", "bridge")
        self._ip("", "link", "set", "bridge", "up")
        for number, name in enumerate(self._names, 1):
            entered = ("nsenter", f"--target={switch}", *self._user) if self._user else ()
            pid = self._hold([*entered, "unshare", *IN_NAMESPACES], name)
            self._hosts[name] = Host(name, f"{NETWORK}.{number}", self._into(pid))
            self._ip(name, *f"link add {INTERFACE} type veth peer name to-{name} netns {switch}".split())
            self._ip("", "link", "set", f"to-{name}", "master", "bridge", "up")
            self._ip(name, "address", "add", f"{NETWORK}.{number}/24", "dev", INTERFACE)
            self._ip(name, "link", "set", INTERFACE, "up")

    def _make_switch(self) -> int:
        try:
            pid = self._hold(["unshare", *IN_NAMESPACES], "switch")
        except NoHosts:
            self._user = ("--user", "--preserve-credentials")
            pid = self._hold(["unshare", "--user", "--map-root-user", *IN_NAMESPACES], "switch")
        self._hosts[""] = Host("", "", self._into(pid))
        return pid

    def _into(self, pid: int) -> tuple[str, ...]:
        return ("nsenter", f"--target={pid}", *self._user, *IN_NAMESPACES)

    def _hold(self, command: list[str], name: str) -> int:
        """Start a process that keeps new namespaces; it ends when our end of its stdin is closed."""
        process = subprocess.Popen(
            [*command, "sh", "-c", WAITS, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        if process.stdout.readline() != b"ready\n":
            process.kill()
            _out, error = process.communicate()
            raise NoHosts(f"namespaces cannot be made here: {error.decode(errors='replace').strip()}")
        self._stack.callback(process.wait)
        for pipe in (process.stdout, process.stderr, process.stdin):
            self._stack.callback(pipe.close)
        return process.pid

    def _ip(self, where: str, *arguments: str) -> None:
        command = [*self._hosts[where].prefix, "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


class HostedEtcd(EtcdCluster):
    """An etcd with a host for each member. This process, on no host, asks them through sockets in their folder."""

    def __init__(self, hosts: Hosts, names: tuple[str, ...], **settings: Any) -> None:
        super().__init__(len(names), **settings)
        self._places = tuple(hosts[name] for name in names)

    def _launch_all(self) -> None:
        self.endpoints = tuple(f"{host.address}:{CLIENT_PORT}" for host in self._places)
        self._peers = tuple(f"http://{host.address}:{PEER_PORT}" for host in self._places)
        for i in range(self._size):
            self._launch(i, "new")

    def _before(self, i: int) -> tuple[str, ...]:
        return self._places[i].prefix

    def _listens_at(self, i: int) -> str:
        return f"http://{self.endpoints[i]},unix://m{i}:0"

    def _open(self, i: int, path: str, body: dict[str, Any] | None, timeout_s: float, token: str = "") -> Any:
        connection = _LocalConnection(self.directory / f"m{i}:0", timeout_s)
        content = None if body is None else json.dumps(body).encode()
        connection.request(
            "GET" if body is None else "POST", f"/{path}", content, {"Authorization": token} if token else {}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"member {i} answers {answer.status} to {path}: {answer.read(200)!r}")
        return answer


class _LocalConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _to(lladdr: str) -> tuple[str, ...]:
    return ("lladdr", lladdr, "dev", INTERFACE)
