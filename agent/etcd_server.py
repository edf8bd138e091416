"""The private etcd of a run that has no etcd of its own: one node, the owner of ``--rdzv-endpoint``, runs it.

It lives as long as that node's agent and is kept in memory as far as etcd can: nothing of it survives, and nobody waits
for a disk. Its parent is a small process (worker/keeper.py) which ends it, and removes its files, however the agent
ends.

It listens for clients on the endpoint's address and port only, without authentication, as the store of torchrun's c10d
backend does. Other members it has none: for these it listens on a Unix socket in a private directory.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import dlaunch
from dlaunch import frames
from dlaunch.addresses import join_host_and_port
from dlaunch.clock import now
from dlaunch.errors import ConfigurationError

from .etcd_binary import find_etcd
from .own_address import Place, bind_error, is_ours, means_loopback, resolve

STOP_S = 5.0  # how long the keeper may take to end etcd and remove its files
LOG_NAME = "etcd.log"
_KEEPER = Path(dlaunch.__file__).parent / "worker" / "keeper.py"
_PEERS = "unix://peers:0"  # a socket in etcd's working directory, which is private
_KEPT_VARIABLE = "ETCD_UNSUPPORTED_ARCH"  # without which etcd refuses to run on some processors
# Variables, not flags: an etcd that does not know one of them goes on. No disk is waited for, and nothing but gRPC is
# spoken: a web page that somebody opens on this host must not reach it.
_WISHES = {"ETCD_UNSAFE_NO_FSYNC": "true", "ETCD_ENABLE_GRPC_GATEWAY": "false", "ETCD_LOGGER": "zap"}
_COMPACTION = {"ETCD_AUTO_COMPACTION_MODE": "periodic", "ETCD_AUTO_COMPACTION_RETENTION": "10m"}


class AlreadyServed(NamedTuple):
    """Something else listens at the endpoint: most likely the etcd of another agent of the run on this host."""

    address: str


class EtcdState(Enum):
    """How far a private etcd is."""

    STARTING = "starting"
    READY = "ready"
    ALREADY_SERVED = "already served"  # another was faster: be its client
    ENDED = "ended"  # after it was ready; its data are lost


class EtcdServer:
    """One private etcd, from its start to its end.

    ``socket`` becomes readable when `state` has something new to tell; at ENDED and ALREADY_SERVED it stays so.
    """

    def __init__(self, program: str, place: Place, port: int, log: Path | None) -> None:
        self.address = join_host_and_port(str(place), port)
        self.socket, keepers_end = socket.socketpair()
        self._place = place
        self._port = port
        self._state = EtcdState.STARTING
        self._reader = frames.FrameReader()
        self._directory: str | None = None  # of the keeper's; for us to remove where the keeper was killed
        self._log = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) if log else _unnamed_file()
        with keepers_end:
            keepers_end.set_inheritable(True)
            keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(keepers_end.fileno())]
            self.keeper_pid = os.posix_spawn(keeper[0], keeper, os.environ, setsid=True)
            start = {"kind": "start", "command": _command(program, self.address), "environment": _environment()}
            frames.send(self.socket, {**start, "temporary": tempfile.gettempdir()}, [self._log])

    @classmethod
    def start(cls, host: str, port: int, log_directory: Path | None) -> EtcdServer | AlreadyServed:
        """Start an etcd for clients that connect to ``host:port``; it is not ready yet.

        Raises ConfigurationError where there is no etcd to run, or the address is not of this host.
        """
        place = _listening_place(host)
        if _is_taken(place, port):
            return AlreadyServed(join_host_and_port(str(place), port))
        program = find_etcd()
        if program is None:
            raise ConfigurationError(
                "This node is to run a private etcd for the run, and there is no etcd program here.",
                "pip install 'dlaunch[etcd]', or install your system's etcd-server, or name an etcd that runs "
                "already with --rdzv-backend etcd-v2 --rdzv-endpoint HOST:PORT.",
            )
        return cls(program, place, port, log_directory / LOG_NAME if log_directory else None)

    def state(self) -> EtcdState:
        """How far it is, without waiting. Raises ConfigurationError where it could not be started."""
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            heard = list(self._reader.feed(data))
        except BlockingIOError:
            return self._state
        except (OSError, frames.FrameError):
            data, heard = b"", []
        for frame in heard:
            if frame["kind"] == "started":
                self._directory = frame["directory"]
            elif frame["kind"] == "ready":
                self._state = EtcdState.READY
            elif self._state is EtcdState.STARTING:
                self._state = self._why_not(frame)
            else:
                self._state = EtcdState.ENDED
        if not data and self._state is EtcdState.STARTING:
            raise _cannot_start("its parent process was killed")
        if not data and self._state is EtcdState.READY:
            self._state = EtcdState.ENDED
        return self._state

    def settled(self, within_s: float) -> EtcdState:
        """Wait until it is no longer starting. Raises ConfigurationError as `state`, and where that takes too long."""
        give_up_at = now() + within_s
        while (state := self.state()) is EtcdState.STARTING:
            if not select.select([self.socket], [], [], max(0.0, give_up_at - now()))[0]:
                raise _cannot_start(f"it was not ready after {within_s:g} s")
        return state

    def stop(self) -> None:
        """End it and remove its files; waits for that."""
        if self.socket.fileno() == -1:
            return
        self.socket.settimeout(STOP_S)
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while data := self.socket.recv(1 << 16):
                for frame in self._reader.feed(data):
                    self._directory = frame.get("directory", self._directory)
        except TimeoutError:  # the keeper is stopped: the kernel kills etcd with it
            os.kill(self.keeper_pid, signal.SIGKILL)
        except (OSError, frames.FrameError):
            pass
        self.socket.close()
        os.close(self._log)
        with suppress(ChildProcessError):
            os.waitpid(self.keeper_pid, 0)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _why_not(self, frame: frames.Frame) -> EtcdState:
        if frame["kind"] == "not_started":
            raise _cannot_start(frame["reason"])
        if _is_taken(self._place, self._port):
            return EtcdState.ALREADY_SERVED
        size = os.fstat(self._log).st_size
        lines = os.pread(self._log, 4096, max(0, size - 4096)).decode("utf-8", "replace").splitlines()
        raise _cannot_start(lines[-1] if lines else f"it ended with status {frame['status']}")


def owns_endpoint(host: str) -> bool:
    """Whether a host name or an address, as it stands in ``--rdzv-endpoint``, is this host.

    As torchrun decides who serves the c10d store: localhost, this host's name, or one of its addresses. Source: torch
    2.13, distributed/elastic/rendezvous/utils.py, _matches_machine_hostname; but where that compares with the addresses
    that this host's name resolves to, and so misses all others, here an address is ours when it can be bound.
    """
    if host in {"localhost", socket.gethostname()}:
        return True
    return any(map(is_ours, _resolve(host)))


def _listening_place(host: str) -> Place:
    """The address to listen on for those who connect to ``host``.

    This host's own name may stand for a loopback address in its /etc/hosts, and for another one everywhere else: only
    then it has to be every address.
    """
    first = next(filter(is_ours, _resolve(host)), None)
    if first is None:
        raise ConfigurationError(
            f"The endpoint {host} is not an address of this host, so no private etcd can run here.",
            "Name this host, or start on the host that --rdzv-endpoint names.",
        )
    if first.is_loopback and not means_loopback(host):
        return Place(first.family, "::" if first.family is socket.AF_INET6 else "0.0.0.0")
    return first


def _resolve(host: str) -> list[Place]:
    try:
        return resolve(host)
    except OSError:
        return []


def _is_taken(place: Place, port: int) -> bool:
    """Whether somebody listens there. Raises ConfigurationError where we may not."""
    code = bind_error(place, port)
    if code not in {0, errno.EADDRINUSE}:
        raise ConfigurationError(
            f"The private etcd cannot listen on {join_host_and_port(str(place), port)} ({os.strerror(code)}).",
            "Name another port with --rdzv-endpoint HOST:PORT, the same on all nodes.",
        )
    return code == errno.EADDRINUSE


def _command(program: str, address: str) -> list[str]:
    url = f"http://{address}"
    return [
        program,
        *("--name", "private", "--data-dir", "data"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", _PEERS, "--initial-advertise-peer-urls", _PEERS),
        *("--initial-cluster", f"private={_PEERS}"),
    ]


def _environment() -> dict[str, str]:
    """Ours, without settings that the user made for another etcd, and without what is for the workers only."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "TZ", _KEPT_VARIABLE}}
    return {**kept, **_WISHES, **_COMPACTION}


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cannot_start(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The private etcd of the run did not start: {why.strip().rstrip('.')}.",
        "Name an etcd that runs already, or another endpoint, with --rdzv-endpoint HOST:PORT.",
    )
