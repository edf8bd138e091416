"""The guard holds the agent's listening socket: while anything on the node lives, its address does not refuse."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from dlaunch import frames

from .driver import PATIENCE_S, Driver
from .marked import VARIABLE, kill_marked, new_mark, wait_until_gone

ROOT = Path(__file__).parents[2]
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here')\nwhile True: signal.pause()\n"
BOTH = pytest.mark.parametrize("mode", ["warm", "exec"])


@contextmanager
def listening_agent(tmp_path: Path, mode: str) -> Iterator[tuple[int, dict[str, int]]]:
    """A process id, and what the agent told of those below it; nothing of it is left afterwards."""
    script = tmp_path / "script.py"
    script.write_text(STUBBORN)
    mark = new_mark()
    command = [sys.executable, "-m", "tests.worker.listening_agent", mode, str(script)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, VARIABLE: mark}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout
        try:
            yield agent.pid, json.loads(agent.stdout.readline())
        finally:
            agent.kill()
            kill_marked(mark)


def connect(port: int) -> int:
    """0, or the error number; an established connection is kept until it is reset, and so tells of the end."""
    with socket.socket() as sock:
        sock.settimeout(PATIENCE_S)
        if code := sock.connect_ex(("127.0.0.1", port)):
            return code
        with suppress(ConnectionResetError):
            sock.recv(1)
    return 0


def inodes(pid: int) -> set[str]:
    """What a process has open: sockets by their inode."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(str(entry.readlink()))
    return found


@BOTH
def test_an_address_refuses_only_after_the_last_worker_is_dead(tmp_path: Path, mode: str) -> None:
    with listening_agent(tmp_path, mode) as (agent, told):
        os.kill(told["starter"], signal.SIGSTOP)  # so that the guard has to wait before it kills
        os.kill(agent, signal.SIGKILL)
        assert connect(told["port"]) == 0  # it waited in the backlog and was reset
        assert not Path(f"/proc/{told['worker']}").exists()
        deadline = monotonic() + PATIENCE_S
        while (code := connect(told["port"])) == 0:
            assert monotonic() < deadline
        assert code == errno.ECONNREFUSED
        assert wait_until_gone([told["starter"], told["guard"]]) == []


def test_a_refusal_follows_the_end_of_the_guard_and_not_that_of_the_agent(tmp_path: Path) -> None:
    with listening_agent(tmp_path, "exec") as (agent, told):
        os.kill(told["guard"], signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        assert wait_until_gone([told["worker"], told["starter"]]) == []
        with socket.create_connection(("127.0.0.1", told["port"]), PATIENCE_S) as waiting:
            os.kill(told["guard"], signal.SIGCONT)
            with pytest.raises(ConnectionResetError):
                waiting.recv(1)
        assert connect(told["port"]) == errno.ECONNREFUSED


@BOTH
@pytest.mark.parametrize("hold_first", [True, False])
def test_what_the_guard_holds_is_in_nobody_below_it(tmp_path: Path, mode: str, hold_first: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(STUBBORN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
        with Driver(
            mode, [sys.executable, "-u", str(script)], hold=[listener.fileno()] if hold_first else []
        ) as driver:
            if not hold_first:
                driver.starter_says("ready")
                frames.send(driver.guard_socket, {"kind": "hold"}, [listener.fileno()])
            worker = driver.spawn()
            worker.out.lines(1)
            pid: Any = driver.starter_says("started", worker.id)["pid"]
            port = listener.getsockname()[1]
            listener.close()
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
                pass
            assert held in inodes(driver.guard.pid)
            assert held not in inodes(driver.starter_pid) | inodes(pid)
        assert connect(port) == errno.ECONNREFUSED
