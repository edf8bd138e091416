"""One scenario with real processes: brings a run to its moment, strikes, and notes all that there is to judge."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expectation import ends_by_itself, is_lethal, strikes_the_first_that_appears
from process_tree import (
    MARK,
    Process,
    catches,
    children_of,
    collect_zombies,
    kill_all,
    now,
    processes_of,
    wait_until_gone,
)
from scenario import Moment, Scenario, Start, Trigger, Victim

PROGRAM = Path(__file__).parent / "chaos_worker.py"
DLAUNCH = Path(sys.executable).parent / "dlaunch"
MOMENT_LIMIT_S = 60.0  # to reach the moment: torch may have to be imported, on a loaded machine
END_LIMIT_S = 40.0  # from the last blow to the agent's end
GONE_LIMIT_S = 20.0  # from the agent's end to that of everything
STOPPED_FOR_S = 0.2
BETWEEN_TWO_S = 0.2


@dataclass(frozen=True, slots=True)
class Observation:
    """What happened."""

    returncode: int | None  # of the agent; None: it did not end in time
    summary: dict[str, Any] | None
    left: tuple[Process, ...]  # that lived too long after the agent's end
    output: str  # of the run, stdout and stderr
    story: tuple[str, ...]  # what was done and seen, with times
    trouble: str = ""  # the scenario could not be carried out as planned


class NotAsPlanned(Exception):
    """The run did not get to where the scenario wants to strike."""


def carry_out(scenario: Scenario, folder: Path) -> Observation:
    """Run a scenario in an empty folder. No process of it lives afterwards, whatever happened."""
    run = _Run(scenario, folder)
    trouble = ""
    try:
        run.reach_the_moment()
        run.strike()
        run.let_it_end()
    except NotAsPlanned as reason:
        trouble = str(reason)
    finally:
        observation = run.observe(trouble)
    return observation


class _Run:
    """One dlaunch and all that is below it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario = scenario
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._output = folder / "output"
        self._story: list[str] = []
        self._first_workers: set[int] = set()
        self._found: dict[str, int] = {}  # who will be struck, where the moment is that they appear
        self._started_at = now()
        with self._output.open("wb") as output:
            self._agent = subprocess.Popen(
                _command(scenario, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(scenario, self._mark),
                cwd=folder,
            )
        self._tell(f"dlaunch started, pid {self._agent.pid}")

    # --- to the moment -------------------------------------------------------------------------------------------

    def reach_the_moment(self) -> None:
        """Wait until the run is where the scenario strikes."""
        match self._scenario.moment:
            case Moment.LAUNCHING:
                pass
            case Moment.PREPARING:
                self._until("a guard is there", lambda: bool(children_of(self._agent.pid, processes_of(self._mark))))
                self._until("the agent listens to signals", lambda: catches(self._agent.pid, signal.SIGTERM))
                self._until_there_is_a_victim()
            case Moment.AT_START:
                self._until_there_is_a_victim()
            case Moment.RUNNING:
                self._until_all_run()
            case Moment.STOPPING:
                self._until_all_run()
                self._pull_the_trigger()
                rank = self._scenario.rank if self._scenario.victim is Victim.WORKER else "*"
                self._until("workers are stopping", lambda: any(self._folder.glob(f"stopping_0_{rank}")))
            case Moment.RESTARTING:
                self._until_all_run()
                self._first_workers = set(self._workers())
                self._pull_the_trigger()
                self._until("dlaunch announces a restart", lambda: "; restarting" in self._text())
                self._until_there_is_a_victim()
            case Moment.AT_END:
                self._until_all_run()
                self._put("finish")
        time.sleep(self._scenario.delay_s)  # not to wait for something: the delay is part of the scenario

    def _until_there_is_a_victim(self) -> None:
        self._until(f"{self._scenario.victim.value} is there to be struck", self._find_victims)

    def _find_victims(self) -> bool:
        self._found = self._victims()
        return bool(self._found)

    def _until_all_run(self) -> None:
        ranks = range(self._scenario.nproc)
        self._until("all workers run", lambda: all((self._folder / f"alive_0_{rank}").exists() for rank in ranks))

    def _pull_the_trigger(self) -> None:
        if self._scenario.trigger is Trigger.SCRIPT_FAILS:
            self._put("fail")
        else:
            self._send(signal.SIGTERM, {"the agent": self._agent.pid})

    # --- the blow ------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Send the signal, and see that it has its effect before anything else happens."""
        victims = self._found or self._victims()
        if not victims:
            if self._scenario.moment is Moment.AT_END:
                self._tell("the victim had ended already")
                return
            raise NotAsPlanned(f"there is no process of {self._scenario.victim.value} to strike")
        doomed = [_pidfd(pid) for pid in victims.values()] if is_lethal(self._scenario) else []
        self._send(self._scenario.signal, victims)
        if self._scenario.impatient:
            time.sleep(BETWEEN_TWO_S)  # not to wait for something: a person is not faster
            self._send(self._scenario.signal, victims)
        for fd in doomed:
            _wait_for_death(fd)
        if self._scenario.signal is signal.SIGSTOP:
            self._after_a_stop(victims)

    def _after_a_stop(self, victims: dict[str, int]) -> None:
        time.sleep(STOPPED_FOR_S)  # not to wait for something: so long the victim stays stopped
        if self._scenario.continued:
            self._send(signal.SIGCONT, victims)
        elif self._scenario.victim is Victim.AGENT:
            self._send(signal.SIGKILL, victims)
        elif not ends_by_itself(self._scenario):
            self._send(signal.SIGTERM, {"the agent": self._agent.pid})

    def _victims(self) -> dict[str, int]:
        """Process ids by name; empty while the victim is not there."""
        tree = processes_of(self._mark)
        guards = children_of(self._agent.pid, tree)
        starters = [child for guard in guards for child in children_of(guard.pid, tree)]
        agent, starter = {"the agent": self._agent.pid}, _first("the starter", starters)
        rank = self._scenario.rank
        seekers: dict[Victim, Callable[[], dict[str, int]]] = {
            Victim.AGENT: lambda: agent,
            Victim.AGENT_AND_STARTER: lambda: {**agent, **starter} if starter else {},
            Victim.STARTER: lambda: starter,
            Victim.GUARD: lambda: _first("the guard", guards),
            Victim.WORKER: lambda: self._one_worker(starters, tree),
            Victim.ALL_WORKERS: lambda: {f"rank {n}": pid for pid, n in self._workers().items() if _lives(pid)},
            Victim.CHILD: lambda: {f"a child of rank {rank}": self._told(0, rank)["child"]},
            Victim.STORE: lambda: _first("the store", self._stores(starters, tree)),
        }
        return seekers[self._scenario.victim]()

    def _one_worker(self, starters: list[Process], tree: list[Process]) -> dict[str, int]:
        """By rank where it has said who it is; else any process that the starter has just started as a worker."""
        rank = self._scenario.rank
        if strikes_the_first_that_appears(self._scenario):
            fresh = [child for starter in starters for child in children_of(starter.pid, tree)]
            fresh = [child for child in fresh if child.pid not in self._first_workers]
            return _first("a new worker", fresh)
        attempt = 1 if self._scenario.moment is Moment.RESTARTING else 0
        told = self._told(attempt, rank)
        return {f"rank {rank}": told["pid"]} if told and _lives(told["pid"]) else {}

    def _stores(self, starters: list[Process], tree: list[Process]) -> list[Process]:
        workers = self._workers()
        return [child for starter in starters for child in children_of(starter.pid, tree) if child.pid not in workers]

    def _workers(self) -> dict[int, int]:
        """Ranks of the first attempt's workers by process id, of those that have said that they live."""
        told = {rank: self._told(0, rank) for rank in range(self._scenario.nproc)}
        return {value["pid"]: rank for rank, value in told.items() if value}

    def _told(self, attempt: int, rank: int) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads((self._folder / f"alive_{attempt}_{rank}").read_text())
        except FileNotFoundError:
            return {}
        return told

    # --- to the end ----------------------------------------------------------------------------------------------

    def let_it_end(self) -> None:
        """Let the script finish, and wait for the agent."""
        if not self._scenario.stops_for_ever or ends_by_itself(self._scenario):
            self._put("finish")
        try:
            self._agent.wait(END_LIMIT_S)
            self._tell(f"dlaunch ended with {self._agent.returncode}")
        except subprocess.TimeoutExpired:
            raise NotAsPlanned(f"dlaunch did not end within {END_LIMIT_S:g} s") from None

    def observe(self, trouble: str) -> Observation:
        """Note how it stands, and clear up what should not be there."""
        left = []
        if self._agent.poll() is not None:
            left = wait_until_gone(self._mark, GONE_LIMIT_S)
            self._tell("nothing of it is left" if not left else f"{len(left)} processes are left")
        returncode = self._agent.poll()
        kill_all(self._mark)
        self._agent.wait()
        collect_zombies(spared=0)
        return Observation(returncode, self._summary(), tuple(left), self._text(), tuple(self._story), trouble)

    def _summary(self) -> dict[str, Any] | None:
        try:
            summary: dict[str, Any] = json.loads((self._folder / "summary.json").read_text())
        except FileNotFoundError:
            return None
        return summary

    # --- small tools ---------------------------------------------------------------------------------------------

    def _send(self, signum: signal.Signals, victims: dict[str, int]) -> None:
        for name, pid in victims.items():
            try:
                os.kill(pid, signum)
                self._tell(f"{signum.name} to {name}, pid {pid}")
            except ProcessLookupError:
                self._tell(f"{signum.name} to {name}, pid {pid}: it had ended already")

    def _put(self, name: str) -> None:
        (self._folder / name).touch()
        self._tell(f"the file '{name}' is there")

    def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = now() + MOMENT_LIMIT_S
        while not is_so():
            if self._agent.poll() is not None:
                raise NotAsPlanned(f"dlaunch ended with {self._agent.returncode} before {what}")
            if now() > deadline:
                raise NotAsPlanned(f"it did not come so far within {MOMENT_LIMIT_S:g} s that {what}")
            time.sleep(0.002)
        self._tell(what)

    def _text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def _tell(self, what: str) -> None:
        self._story.append(f"{now() - self._started_at:7.3f} s  {what}")


def _command(scenario: Scenario, folder: Path) -> list[str]:
    return [
        str(DLAUNCH),
        "run",
        f"--nproc-per-node={scenario.nproc}",
        f"--start-method={'exec' if scenario.start is Start.EXEC else 'warm'}",
        f"--max-restarts={scenario.max_restarts}",
        f"--backoff={scenario.backoff_s:g}",
        f"--grace={scenario.grace_s:g}",
        f"--log-dir={folder / 'logs'}",
        f"--summary-json={folder / 'summary.json'}",
        str(PROGRAM),
        str(folder),
        scenario.behaviour,
    ]


def _environment(scenario: Scenario, mark: str) -> dict[str, str]:
    environment = {**os.environ, MARK: mark}
    if scenario.start is Start.WARM_BARE:
        environment["PYTHON_EXEC"] = python_without_packages()
    return environment


def python_without_packages() -> str:
    """The Python that the virtual environment was made from: it has no torch, so a warm starter of it is ready soon."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _first(name: str, processes: list[Process]) -> dict[str, int]:
    return {name: processes[0].pid} if processes else {}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _wait_for_death(fd: int | None) -> None:
    """Until the process is dead; one that does not die is judged by what the run comes to."""
    if fd is not None:
        select.select([fd], [], [], 10.0)
        os.close(fd)
