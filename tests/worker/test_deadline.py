"""The starter ends its workers when its node's lease runs out, whatever its agent is doing, and works again after."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlaunch import frames
from dlaunch.clock import now

from .driver import Driver
from .marked import VARIABLE, marked, wait_until_gone

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("mode", ["warm", "exec"])
FOREVER = "import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nwhile True: signal.pause()\n"
REFUSAL = "its node's lease had run out"


def driver_of(tmp_path: Path, mode: str, program: str) -> Driver:
    script = tmp_path / "script.py"
    script.write_text(program)
    driver = Driver(mode, [sys.executable, "-u", str(script)])
    driver.starter_says("ready")
    return driver


def set_deadline(driver: Driver, in_s: float | None) -> float:
    """Returns the deadline on dlaunch's clock."""
    at = now() + in_s if in_s is not None else None
    driver.ask({"kind": "deadline", "at": at})
    return at or 0.0


def wait_for_clock(at: float) -> None:
    while (left := at - now()) >= 0:
        time.sleep(left + 0.001)


def kinds(told: Sequence[frames.Frame]) -> list[tuple[str, int | None]]:
    return [(frame["kind"], frame.get("id")) for frame in told]


@BOTH
def test_workers_and_all_below_them_are_dead_at_the_deadline_although_the_agent_is_stopped(
    mark: str, mode: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.worker.agent_process", mode, str(SCRIPTS / "tree.py"), "0.3"],
        cwd=ROOT,
        env={**os.environ, VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout
        told = json.loads(agent.stdout.readline())
        agent.send_signal(signal.SIGSTOP)
        assert wait_until_gone(told["below"]) == []
        assert sorted(marked(mark)) == sorted([agent.pid, told["guard"], told["starter"]])
        agent.kill()
    assert wait_until_gone([told["guard"], told["starter"]]) == []


@BOTH
def test_the_agent_hears_that_it_is_overdue_before_it_hears_of_the_ends_that_this_caused(
    tmp_path: Path, mode: str
) -> None:
    program = "import os\nif os.environ['RANK'] == '0': raise SystemExit(3)\n" + FOREVER
    with driver_of(tmp_path, mode, program) as driver:
        failed, *others = [driver.spawn(environment={"RANK": str(rank)}) for rank in range(3)]
        for worker in others:
            worker.out.lines(1)
        failed.err.all()
        at = set_deadline(driver, 0.0)
        overdue = driver.starter_says("overdue")
        assert overdue["deadline"] == at <= overdue["at"]
        told = [pair for pair in kinds(driver._kept) if pair[0] == "exited"]
        assert [exited for exited in told if exited[1] != failed.id] == [], "of a worker that it killed"
        assert driver.exit_code(failed) == 3
        assert [driver.exit_code(worker) for worker in others] == [-signal.SIGKILL] * 2


def test_a_worker_that_ended_by_itself_before_the_kill_is_told_before_it(tmp_path: Path) -> None:
    with driver_of(tmp_path, "exec", FOREVER) as driver:
        worker = driver.spawn()
        pid = int(worker.out.lines(1)[0])
        at = set_deadline(driver, 1.0)
        driver.ask({"kind": "serve_store", "id": 5, "address": "127.0.0.1", "port": 1, "world_size": 1}, [0])
        driver.starter_says("not_started", 5)  # so it has heard of the deadline
        os.kill(driver.starter_pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGTERM)
        assert wait_until_gone([pid]) == []
        wait_for_clock(at)
        os.kill(driver.starter_pid, signal.SIGCONT)
        driver.starter_says("overdue")
        assert ("exited", worker.id) in kinds(driver._kept)
        assert driver.exit_code(worker) == -signal.SIGTERM


@BOTH
def test_past_the_deadline_nothing_starts_until_there_is_a_new_one(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, "pass") as driver:
        set_deadline(driver, 0.0)
        driver.starter_says("overdue")
        refused = driver.starter_says("not_started", driver.spawn().id)
        assert (refused["error"], refused["overdue"]) == (REFUSAL, True)
        driver.ask({"kind": "serve_store", "id": 5, "address": "127.0.0.1", "port": 1, "world_size": 1}, [0])
        assert driver.starter_says("not_started", 5)["overdue"] is True
        set_deadline(driver, 1000.0)
        assert driver.exit_code(driver.spawn()) == 0


@BOTH
def test_the_next_lease_can_run_out_too(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, FOREVER) as driver:
        for _ in range(2):
            set_deadline(driver, 1000.0)
            worker = driver.spawn()
            worker.out.lines(1)
            at = set_deadline(driver, 0.0)
            assert driver.starter_says("overdue")["deadline"] == at
            assert driver.exit_code(worker) == -signal.SIGKILL
            driver.sweep()


@BOTH
def test_a_renewal_moves_the_deadline_and_none_lifts_it(tmp_path: Path, mode: str) -> None:
    program = "import sys, time\ntime.sleep(float(sys.argv[1]))\n"
    with driver_of(tmp_path, mode, program) as driver:
        command = [sys.executable, "-u", str(tmp_path / "script.py")]
        set_deadline(driver, 0.1)
        set_deadline(driver, None)
        assert driver.exit_code(driver.spawn(arguments=["0.2"], command=[*command, "0.2"])) == 0
        soon, later = now() + 0.1, now() + 0.3
        driver.socket.sendall(b"".join(frames.encode({"kind": "deadline", "at": at}) for at in (soon, later)))
        worker = driver.spawn(arguments=["1000"], command=[*command, "1000"])
        overdue = driver.starter_says("overdue")
        assert overdue["deadline"] == later <= overdue["at"]
        assert driver.exit_code(worker) == -signal.SIGKILL


@BOTH
def test_a_renewal_that_came_while_the_starter_could_not_look_counts(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, FOREVER) as driver:
        worker = driver.spawn()
        worker.out.lines(1)
        os.kill(driver.starter_pid, signal.SIGSTOP)
        at = set_deadline(driver, 0.1)
        set_deadline(driver, 1000.0)
        wait_for_clock(at)
        os.kill(driver.starter_pid, signal.SIGCONT)
        other = driver.spawn()
        other.out.lines(1)
        driver.ask({"kind": "signal", "id": worker.id, "signal": signal.SIGTERM})
        assert driver.exit_code(worker) == -signal.SIGTERM
        driver.ask({"kind": "kill", "id": other.id})
        assert driver.exit_code(other) == -signal.SIGKILL
        assert "overdue" not in [frame["kind"] for frame in driver._kept]


@BOTH
def test_what_was_asked_before_the_deadline_and_is_heard_after_it_does_not_start(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, FOREVER) as driver:
        worker = driver.spawn()
        worker.out.lines(1)
        os.kill(driver.starter_pid, signal.SIGSTOP)
        at = set_deadline(driver, 0.1)
        late = driver.spawn()
        wait_for_clock(at)
        os.kill(driver.starter_pid, signal.SIGCONT)
        assert driver.starter_says("not_started", late.id)["overdue"] is True
        driver.starter_says("overdue")
        assert driver.exit_code(worker) == -signal.SIGKILL


@BOTH
def test_an_agent_that_stopped_in_the_middle_of_a_request_delays_no_deadline(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, FOREVER) as driver:
        worker = driver.spawn()
        pids = [int(worker.out.lines(1)[0])]
        set_deadline(driver, 0.2)
        rest = frames.encode({"kind": "deadline", "at": now() + 1000.0})
        for piece in (rest[:2], rest[2:30]):
            driver.socket.sendall(piece)
        assert wait_until_gone(pids) == []
        driver.starter_says("overdue")
        assert driver.exit_code(worker) == -signal.SIGKILL
        driver.socket.sendall(rest[30:])
        driver.spawn().out.lines(1)


@BOTH
def test_an_agent_that_reads_nothing_delays_no_deadline_and_hears_everything_later(tmp_path: Path, mode: str) -> None:
    count = 3000  # refusals: more than fit into the socket
    with driver_of(tmp_path, mode, FOREVER) as driver:
        worker = driver.spawn()
        pids = [int(worker.out.lines(1)[0])]
        store = {"kind": "serve_store", "address": "127.0.0.1", "port": 1, "world_size": 1}
        for number in range(count):
            driver.ask({**store, "id": 10_000 + number}, [0])
        set_deadline(driver, 0.0)
        assert wait_until_gone(pids) == []
        assert driver.exit_code(worker) == -signal.SIGKILL
        told = kinds(driver._kept)
        assert told[-1] == ("overdue", None)
        assert [number for kind, number in told if kind == "not_started"] == list(range(10_000, 10_000 + count))


class Hanging:
    """A program of which the execution hangs, as on a file system that does not answer, until it is let go.

    We hold a lease on the file (fcntl(2)), so that the kernel has everybody wait who opens it.
    """

    def __init__(self, path: Path) -> None:
        path.write_text("#!/bin/sh\nexit 5\n")
        path.chmod(0o755)
        self.command = [str(path)]
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # it tells of those who wait
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def let_go(self) -> None:
        os.close(self._fd)


def test_a_program_that_hangs_before_it_is_executed_delays_no_deadline(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path / "program")
    with driver_of(tmp_path, "exec", FOREVER) as driver:
        worker = driver.spawn()
        pids = [int(worker.out.lines(1)[0])]
        set_deadline(driver, 0.2)
        late = driver.spawn(command=hanging.command, python=False)
        assert wait_until_gone(pids) == []
        driver.starter_says("overdue")
        assert [driver.exit_code(each) for each in (worker, late)] == [-signal.SIGKILL] * 2
        hanging.let_go()
        set_deadline(driver, 1000.0)
        driver.spawn().out.lines(1)


def test_a_renewal_that_comes_while_a_program_hangs_counts(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path / "program")
    with driver_of(tmp_path, "exec", FOREVER) as driver:
        worker = driver.spawn()
        worker.out.lines(1)
        soon = now() + 0.1
        driver.ask({"kind": "deadline", "at": soon})
        late = driver.spawn(command=hanging.command, python=False)
        set_deadline(driver, 1000.0)
        wait_for_clock(soon + 0.2)
        hanging.let_go()
        assert driver.exit_code(late) == 5
        driver.ask({"kind": "signal", "id": worker.id, "signal": signal.SIGTERM})
        assert driver.exit_code(worker) == -signal.SIGTERM
        assert "overdue" not in [frame["kind"] for frame in driver._kept]
