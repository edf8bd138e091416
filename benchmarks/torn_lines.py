"""Whether the lines of many ranks that print as fast as they can come out whole."""

from __future__ import annotations

import re

from process_tree import now
from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import EXEC, TORCHRUN, WARM, Launcher, Trial

_LINE = re.compile(r"(?:\[[^]]*\]:|\d+:\d+ )?rank (\d+) line (\d+) (x*)\.")


def torn_lines(count: int) -> Question:
    whole = Budget("dlaunch", "0", lambda medians: medians["dlaunch"] == 0)
    metrics = (
        Metric("torn", f"lines that are not exactly one rank's, of 8 x {count:,}", "", (whole,)),
        Metric("lost", "lines of a rank that came out nowhere whole", "", (whole,)),
        Metric("seconds", "the whole run", "s"),
    )
    arms = {launcher: _measure_lines(launcher, 8, count) for launcher in (WARM, TORCHRUN, EXEC)}
    return ask("torn-lines", metrics, arms)


def _measure_lines(launcher: Launcher, nproc: int, count: int) -> Measure:
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
