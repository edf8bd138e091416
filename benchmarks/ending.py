"""The last line of a script, to its process reaped."""

from __future__ import annotations

from pathlib import Path

from process_tree import now
from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import EXEC, TORCHRUN, WARM, Launcher, Trial


def ending() -> Question:
    budget = Budget("dlaunch", "<= 0.4 x", lambda medians: medians["dlaunch"] <= 0.4 * medians["torchrun"])
    metrics = (
        Metric("reaped", "script's last line to its process reaped, torch loaded", "s", (budget,)),
        Metric("over", "script's last line to the launcher's end", "s"),
    )
    return ask("ending", metrics, {launcher: _measure_ending(launcher) for launcher in (WARM, TORCHRUN, EXEC)})


def _measure_ending(launcher: Launcher) -> Measure:
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
