"""kill -9 of a worker, to the first line and to the next training step of the whole world."""

from __future__ import annotations

import contextlib
import os
import signal

from ddp_events import events, restarted, times
from process_tree import now
from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import EXEC, TORCHRUN, TORCHRUN_UNSHARED, WARM, Launcher, TimedOut, Trial

RESTART_LIMIT_S = 45.0  # after which a restart counts as hung


def recovery() -> Question:
    in_time = Budget("dlaunch", "<= 0.2 s", lambda medians: medians["dlaunch"] <= 0.2)
    times_20 = Budget(
        "dlaunch",
        "20 x faster than the faster torchrun",
        lambda m: 20 * m["dlaunch"] <= min(m[one] for one in (TORCHRUN.name, TORCHRUN_UNSHARED.name) if one in m),
    )
    own_store = TORCHRUN_UNSHARED.name  # compared with this one, since the other hangs in many of its restarts
    metrics = (
        Metric("first_line", "kill -9 of a worker to the first line of the last restarted worker", "s", (), own_store),
        Metric("step", "kill -9 of a worker to the next step of the whole world", "s", (in_time, times_20), own_store),
    )
    launchers = (WARM, TORCHRUN, EXEC, TORCHRUN_UNSHARED)
    return ask("recovery", metrics, {launcher: _measure_recovery(launcher) for launcher in launchers})


def _measure_recovery(launcher: Launcher) -> Measure:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(2, "ddp_steps.py", str(trial.folder), max_restarts=3))
        trial.until(lambda: all(times(trial, "step", rank, after=0.0)[9:] for rank in (0, 1)))
        (_name, _attempt, pid, _at) = events(trial, 1)[-1]
        killed_at = now()
        os.kill(int(pid), signal.SIGKILL)
        trial.until(lambda: all(restarted(trial, "step", rank) for rank in (0, 1)), RESTART_LIMIT_S)
        numbers = {
            "first_line": max(restarted(trial, "first-line", rank)[-1] for rank in (0, 1)) - killed_at,
            "step": max(restarted(trial, "step", rank)[0] for rank in (0, 1)) - killed_at,
        }
        trial.finish()
        with contextlib.suppress(TimedOut):  # what was to be measured has been measured
            trial.end(RESTART_LIMIT_S)
        return numbers

    return measure
