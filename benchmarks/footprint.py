"""What the launcher itself costs: the CPU time of its help, the memory of its own process."""

from __future__ import annotations

import os

from proc_memory import memory_mb
from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import TORCHRUN, WARM, Launcher, Trial


def help_cpu() -> Question:
    budget = Budget("dlaunch", "<= 0.2 s", lambda medians: medians["dlaunch"] <= 0.2)
    metric = Metric("cpu", "CPU time of --help, user and system", "s", (budget,))
    return ask("help", (metric,), {launcher: _measure_help(launcher) for launcher in (WARM, TORCHRUN)})


def _measure_help(launcher: Launcher) -> Measure:
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


def agent_memory() -> Question:
    budget = Budget("dlaunch", "<= 40 MB", lambda medians: medians["dlaunch"] <= 40)
    metrics = (
        Metric("rss", "memory of the launcher's own process while a job runs, RSS", "MB", (budget,)),
        Metric("pss", "the same, PSS", "MB"),
    )
    return ask("agent-memory", metrics, {one: _measure_agent_memory(one) for one in (WARM, TORCHRUN)})


def _measure_agent_memory(launcher: Launcher) -> Measure:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(1, "holds.py", str(trial.folder)))
        trial.until((trial.folder / "running_0").exists)
        numbers = {"rss": memory_mb(trial.pid, "Rss"), "pss": memory_mb(trial.pid, "Pss")}
        trial.finish()
        trial.end()
        return numbers

    return measure
