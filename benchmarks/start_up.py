"""From the command to the first line of the script."""

from __future__ import annotations

import re
import sys

from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import EXEC, PROGRAMS, TORCHRUN, WARM, Launcher, TimedOut, Trial

PLAIN = Launcher("python -c import torch", ())


def first_line() -> Question:
    budgets = (
        Budget("dlaunch exec", "<= 0.15 s", lambda medians: medians["dlaunch exec"] <= 0.15),
        Budget("dlaunch", "<= import torch + 0.2 s", lambda medians: medians["dlaunch"] <= medians[PLAIN.name] + 0.2),
    )
    metric = Metric("first_line", "from the command to the first line of a no-op script", "s", budgets)
    arms = {launcher: _measure_first_line(launcher) for launcher in (WARM, EXEC, TORCHRUN)}
    return ask("first-line", (metric,), {**arms, PLAIN: _measure_import})


def _measure_first_line(launcher: Launcher) -> Measure:
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
