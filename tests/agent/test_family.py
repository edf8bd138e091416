"""Real processes in states that are hard to kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from dlaunch.agent.family import handles


def python(code: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


ANCESTOR = """
    import os, subprocess, sys
    from dlaunch.agent.family import become_subreaper, kill_everything_below
    become_subreaper()
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    pids = child.stdout.readline()
    assert kill_everything_below(os.getpid()) == []
    print(pids, end="", flush=True)
"""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("import os, time; print(os.getpid(), flush=True); time.sleep(600)", id="child"),
        pytest.param(
            "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
            id="stopped child",
        ),
        pytest.param(
            "import os, signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(os.getpid(), flush=True); time.sleep(600)",
            id="child that ignores SIGTERM",
        ),
        pytest.param(
            "import os, time\n"
            "r, w = os.pipe()\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        os.write(w, str(os.getpid()).encode()); time.sleep(600)\n"
            "    os._exit(0)\n"
            "os.wait(); daemon = os.read(r, 20).decode()\n"
            "print(os.getpid(), daemon, flush=True); time.sleep(600)",
            id="daemon that left its session",
        ),
    ],
)
def test_everything_below_is_killed_whatever_its_state(family: str) -> None:
    with python(ANCESTOR, family) as ancestor:
        out, _ = ancestor.communicate(timeout=60)
    pids = [int(word) for word in out.split()]
    assert ancestor.returncode == 0
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("handler", "expected"), [("lambda *_: None", True), ("signal.SIG_IGN", True), ("signal.SIG_DFL", False)]
)
def test_a_signal_is_told_to_be_handled_only_where_it_is(handler: str, expected: bool) -> None:
    code = f"import signal; signal.signal(signal.SIGUSR1, {handler}); print('set', flush=True); signal.pause()"
    with python(code) as process:
        assert process.stdout
        process.stdout.readline()
        assert handles(process.pid, signal.SIGUSR1) is expected
        process.kill()


def test_a_process_that_is_gone_handles_nothing() -> None:
    with python("pass") as process:
        process.wait(timeout=60)
    assert not Path(f"/proc/{process.pid}").exists()
    assert handles(process.pid, signal.SIGUSR1) is False
    assert os.getpid() != process.pid
