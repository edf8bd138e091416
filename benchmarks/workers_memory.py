"""The memory of all processes of a run, with shared pages counted once (PSS)."""

from __future__ import annotations

import contextlib

from ddp_events import times
from proc_memory import memory_mb
from question import Measure, Numbers, Question, ask
from ratios import Budget, Metric
from trial import TORCHRUN, WARM, Launcher, TimedOut, Trial


def workers_memory(nproc: int) -> Question:
    budget = Budget("dlaunch", "<= 0.4 x", lambda medians: medians["dlaunch"] <= 0.4 * medians["torchrun"])
    what = f"of {nproc} workers after 5 DDP steps, PSS"
    metrics = (
        Metric("without", f"memory {what}, all processes but the launcher's", "MB", (budget,)),
        Metric("with", f"memory {what}, all processes", "MB", (budget,)),
    )
    arms = {launcher: _measure_memory(launcher, nproc) for launcher in (WARM, TORCHRUN)}
    return ask(f"memory-{nproc}", metrics, arms)


def _measure_memory(launcher: Launcher, nproc: int) -> Measure:
    def measure(trial: Trial) -> Numbers:
        trial.start(launcher.start(nproc, "ddp_steps.py", str(trial.folder), "5"))
        trial.until(lambda: all(times(trial, "holding", rank, after=0.0) for rank in range(nproc)))
        processes = trial.processes()
        own = memory_mb(trial.pid, "Pss")
        whole = sum(memory_mb(process.pid, "Pss") for process in processes)
        trial.finish()
        with contextlib.suppress(TimedOut):
            trial.end()
        return {"without": whole - own, "with": whole}

    return measure
