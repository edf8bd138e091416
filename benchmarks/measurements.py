"""What is measured: for each question the arms, each of which is one trial that returns its numbers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from process_tree import now
from ratios import Budget, Metric
from trial import EXEC, PROGRAMS, TORCHRUN, TORCHRUN_UNSHARED, WARM, Launcher, TimedOut, Trial

Numbers = dict[str, float]  # by the name of the metric
RESTART_LIMIT_S = 45.0  # after which a restart counts as hung
_LINE = re.compile(r"(?:\[[^]]*\]:|\d+:\d+ )?rank (\d+) line (\d+) (x*)\.")


@dataclass(frozen=True, slots=True)
class Question:
    """Something to measure, in the same way for every arm."""

    name: str
    metrics: tuple[Metric, ...]
    arms: dict[str, Callable[[Trial], Numbers]]
    environments: dict[str, dict[str, str]]


def questions(quick: bool) -> list[Question]:
    """All that can be measured; ``quick`` takes smaller sizes, for a look at whether it works."""
    lines = 500 if quick else 20_000
    return [
        _first_line(),
        _help_cpu(),
        _agent_memory(),
        _recovery(),
        _ending(),
        *[_memory(nproc) for nproc in ((2,) if quick else (4, 8))],
        _torn_lines(lines),
    ]


def _question(name: str, metrics: tuple[Metric, ...], arms: dict[Launcher, Callable[[Trial], Numbers]]) -> Question:
    by_name = {launcher.name: arm for launcher, arm in arms.items()}
    return Question(name, metrics, by_name, {launcher.name: launcher.environment for launcher in arms})


# --- from the command to the first line of the script ------------------------------------------------------------

PLAIN = Launcher("python -c import torch", ())


def _first_line() -> Question:
    budgets = (
        Budget("dlaunch exec", "<= 0.15 s", lambda medians: medians["dlaunch exec"] <= 0.15),
        Budget("dlaunch", "<= import torch + 0.2 s", lambda medians: medians["dlaunch"] <= medians[PLAIN.name] + 0.2),
    )
    metric = Metric("first_line", "from the command to the first line of a no-op script", "s", budgets)
    arms = {launcher: _measure_first_line(launcher) for launcher in (WARM, EXEC, TORCHRUN)}
    return _question("first-line", (metric,), {**arms, PLAIN: _measure_import})


def _measure_first_line(launcher: Launcher) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(1, "first_line.py"))
        return _time_to_first_line(trial)

    return measure


def _measure_import(trial: Trial) -> Numbers:
    trial.start([sys.executable, "-c", f"import torch, runpy; runpy.run_path({str(PROGRAMS / 'first_line.py')!r})"])
    return _time_to_first_line(trial)


def _time_to_first_line(trial: Trial) -> Numbers:
    trial.end()
    found = re.search(r"at (\d+\.\d+)", trial.output)
    if found is None:
        raise TimedOut
    return {"first_line": float(found[1]) - trial.started_at}


# --- the launcher itself -----------------------------------------------------------------------------------------


def _help_cpu() -> Question:
    budget = Budget("dlaunch", "<= 0.2 s", lambda medians: medians["dlaunch"] <= 0.2)
    metric = Metric("cpu", "CPU time of --help, user and system", "s", (budget,))
    return _question("help", (metric,), {launcher: _measure_help(launcher) for launcher in (WARM, TORCHRUN)})


def _measure_help(launcher: Launcher) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        null = os.open(os.devnull, os.O_RDWR)
        pid = os.posix_spawn(
            launcher.command[0],
            [launcher.command[0], "--help"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in range(3)],
        )
        os.close(null)
        _pid, _status, usage = os.wait4(pid, 0)
        return {"cpu": usage.ru_utime + usage.ru_stime}

    return measure


def _agent_memory() -> Question:
    budget = Budget("dlaunch", "<= 40 MB", lambda medians: medians["dlaunch"] <= 40)
    metrics = (
        Metric("rss", "memory of the launcher's own process while a job runs, RSS", "MB", (budget,)),
        Metric("pss", "the same, PSS", "MB"),
    )
    return _question("agent-memory", metrics, {one: _measure_agent_memory(one) for one in (WARM, TORCHRUN)})


def _measure_agent_memory(launcher: Launcher) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(1, "holds.py", str(trial.folder)))
        trial.until((trial.folder / "running_0").exists)
        numbers = {"rss": _memory_mb(trial.pid, "Rss"), "pss": _memory_mb(trial.pid, "Pss")}
        trial.finish()
        trial.end()
        return numbers

    return measure


# --- kill -9 of a worker -----------------------------------------------------------------------------------------


def _recovery() -> Question:
    in_time = Budget("dlaunch", "<= 0.2 s", lambda medians: medians["dlaunch"] <= 0.2)
    times_20 = Budget(
        "dlaunch",
        "20 x faster than the faster torchrun",
        lambda m: 20 * m["dlaunch"] <= min(m[one] for one in (TORCHRUN.name, TORCHRUN_UNSHARED.name) if one in m),
    )
    metrics = (
        Metric("first_line", "kill -9 of a worker to the first line of the last restarted worker", "s"),
        Metric("step", "kill -9 of a worker to the next training step of the whole world", "s", (in_time, times_20)),
    )
    launchers = (WARM, TORCHRUN, EXEC, TORCHRUN_UNSHARED)
    return _question("recovery", metrics, {launcher: _measure_recovery(launcher) for launcher in launchers})


def _measure_recovery(launcher: Launcher) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(2, "ddp_steps.py", str(trial.folder), max_restarts=3))
        trial.until(lambda: all(_times(trial, "step", rank, after=0.0)[9:] for rank in (0, 1)))
        (_name, _attempt, pid, _at) = _events(trial, 1)[-1]
        killed_at = now()
        os.kill(int(pid), signal.SIGKILL)
        trial.until(lambda: all(_restarted(trial, "step", rank) for rank in (0, 1)), RESTART_LIMIT_S)
        numbers = {
            "first_line": max(_restarted(trial, "first-line", rank)[-1] for rank in (0, 1)) - killed_at,
            "step": max(_restarted(trial, "step", rank)[0] for rank in (0, 1)) - killed_at,
        }
        trial.finish()
        with contextlib.suppress(TimedOut):  # what was to be measured has been measured
            trial.end(RESTART_LIMIT_S)
        return numbers

    return measure


def _events(trial: Trial, rank: int) -> list[list[str]]:
    try:
        lines = (trial.folder / f"events_{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [fields for line in lines if len(fields := line.split()) == 4]


def _times(trial: Trial, event: str, rank: int, after: float) -> list[float]:
    return [float(at) for name, _attempt, _pid, at in _events(trial, rank) if name == event and float(at) > after]


def _restarted(trial: Trial, event: str, rank: int) -> list[float]:
    """The times of an event in the newest attempt after the first; empty while there is none."""
    events = _events(trial, rank)
    newest = events[-1][1] if events else "0"
    return [float(at) for name, attempt, _pid, at in events if name == event and attempt == newest != "0"]


# --- the end of a worker -----------------------------------------------------------------------------------------


def _ending() -> Question:
    budget = Budget("dlaunch", "<= 0.4 x", lambda medians: medians["dlaunch"] <= 0.4 * medians["torchrun"])
    metrics = (
        Metric("reaped", "script's last line to its process reaped, torch loaded", "s", (budget,)),
        Metric("over", "script's last line to the launcher's end", "s"),
    )
    return _question("ending", metrics, {launcher: _measure_ending(launcher) for launcher in (WARM, TORCHRUN, EXEC)})


def _measure_ending(launcher: Launcher) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(1, "ends.py", str(trial.folder)))
        trial.until((trial.folder / "ending").exists)
        pid = int((trial.folder / "ending").read_text())
        trial.finish()
        trial.until(lambda: not Path(f"/proc/{pid}").exists())
        reaped_at = now()
        trial.end()
        ended_at = now()
        last_line_at = float((trial.folder / "end").read_text())
        return {"reaped": reaped_at - last_line_at, "over": ended_at - last_line_at}

    return measure


# --- memory ------------------------------------------------------------------------------------------------------


def _memory(nproc: int) -> Question:
    budget = Budget("dlaunch", "<= 0.4 x", lambda medians: medians["dlaunch"] <= 0.4 * medians["torchrun"])
    what = f"of {nproc} workers after 5 DDP steps, PSS"
    metrics = (
        Metric("without", f"memory {what}, all processes but the launcher's", "MB", (budget,)),
        Metric("with", f"memory {what}, all processes", "MB", (budget,)),
    )
    arms = {launcher: _measure_memory(launcher, nproc) for launcher in (WARM, TORCHRUN)}
    return _question(f"memory-{nproc}", metrics, arms)


def _measure_memory(launcher: Launcher, nproc: int) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(nproc, "ddp_steps.py", str(trial.folder), "5"))
        trial.until(lambda: all(_times(trial, "holding", rank, after=0.0) for rank in range(nproc)))
        processes = trial.processes()
        own = _memory_mb(trial.pid, "Pss")
        whole = sum(_memory_mb(process.pid, "Pss") for process in processes)
        trial.finish()
        with contextlib.suppress(TimedOut):
            trial.end()
        return {"without": whole - own, "with": whole}

    return measure


def _memory_mb(pid: int, kind: str) -> float:
    """RSS or PSS of a process in MB (10^6 bytes); 0 for one that has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


# --- lines -------------------------------------------------------------------------------------------------------


def _torn_lines(count: int) -> Question:
    whole = Budget("dlaunch", "0", lambda medians: medians["dlaunch"] == 0)
    metrics = (
        Metric("torn", f"lines that are not exactly one rank's, of 8 x {count:,}", "", (whole,)),
        Metric("lost", "lines of a rank that came out nowhere whole", "", (whole,)),
        Metric("seconds", "the whole run", "s"),
    )
    arms = {launcher: _measure_lines(launcher, 8, count) for launcher in (WARM, TORCHRUN)}
    return _question("torn-lines", metrics, arms)


def _measure_lines(launcher: Launcher, nproc: int, count: int) -> Callable[[Trial], Numbers]:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(nproc, "many_lines.py", str(count)))
        trial.end()
        seconds = now() - trial.started_at
        whole, torn = _sort_lines(trial.output)
        return {"torn": torn, "lost": nproc * count - len(whole), "seconds": seconds}

    return measure


def _sort_lines(output: str) -> tuple[set[tuple[int, int]], int]:
    """The lines that came out whole, by rank and number, and how many others there are."""
    whole: set[tuple[int, int]] = set()
    torn = 0
    for line in output.split("\n")[:-1]:
        found = _LINE.fullmatch(line)
        if found and len(found[3]) == int(found[2]) % 97:
            whole.add((int(found[1]), int(found[2])))
        elif "rank" in line or "line" in line or "xx" in line or not line:
            torn += 1
    return whole, torn
