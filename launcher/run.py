"""``dlaunch run``: from the command line to the exit code of the job.

What only a part of the runs needs (the agent, the report, the summary) is imported where it is needed, so that a
mistake in the command line and the help answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlaunch.environ import PASSWORD_VARIABLE
from dlaunch.spec import JobSpec
from dlaunch.ways import check_way_for

from .preflight import check_current_folder, check_job, find_interpreter
from .settings import Given
from .specify import specify

if TYPE_CHECKING:
    from dlaunch.agent.signals import SignalSource
    from dlaunch.outcome import Outcome

    from .terminal import Terminal


def specify_from_here(given: Given, command: Sequence[str]) -> JobSpec:
    """The checked job of a command line and this process's environment; raises DlaunchError."""
    check_current_folder()
    spec = specify(
        given, command, os.environ, interpreter=find_interpreter(os.environ), new_run_id=os.urandom(16).hex()
    )
    check_job(spec, os.environ)
    os.environ.pop(PASSWORD_VARIABLE, None)  # no process that we start has any business with it
    return spec


def run_job(spec: JobSpec) -> int:
    """Run the job on this node, tell how it ended, and return the exit code."""
    from dlaunch.agent.resolve import resolve_local_world_size  # noqa: PLC0415
    from dlaunch.agent.signals import SignalSource  # noqa: PLC0415

    interpreter = spec.program.interpreter or sys.executable
    local_world_size = resolve_local_world_size(spec.nproc_per_node, interpreter, os.environ)
    check_way_for(spec.parallel, local_world_size)
    signals = SignalSource(spec.signals)
    signals.listen()
    try:
        terminal, outcome = _run(spec, local_world_size, signals)
    except BaseException:
        signals.restore()
        raise
    signals.call(terminal.abandon)  # one that comes now can only end the wait for a reader that does not read
    _tell(spec, outcome, terminal)
    signals.ignore()
    from dlaunch.agent.layout import default_log_path, prune_old_runs  # noqa: PLC0415

    prune_old_runs(default_log_path())
    return outcome.exit_code


def _run(spec: JobSpec, local_world_size: int, signals: SignalSource) -> tuple[Terminal, Outcome]:
    """The outcome, and the terminal that may still have output of the job to show."""
    from dlaunch.agent.starter import Starter  # noqa: PLC0415

    starter = Starter(spec, spec.start_method, local_world_size)  # gets ready while the rest is imported
    from dlaunch.agent.run import run_node  # noqa: PLC0415

    from .terminal import Terminal  # noqa: PLC0415

    terminal = Terminal(spec)
    try:
        return terminal, run_node(spec, local_world_size, terminal, starter, signals)
    except BaseException:
        terminal.close()
        raise


def _tell(spec: JobSpec, outcome: Outcome, terminal: Terminal) -> None:
    """Write the summary, and the report behind all that the job has printed."""
    if spec.summary_json is not None:
        from .summary import write_outcome  # noqa: PLC0415

        write_outcome(spec.summary_json, spec, outcome)
    if report := _report(outcome, spec):
        terminal.report(report)
    terminal.close()


def _report(outcome: Outcome, spec: JobSpec) -> str:
    """What to say at the end; nothing of a run that simply succeeded."""
    if outcome.exit_code == 0 and not outcome.restarts_used:
        return ""
    from .report import render_report  # noqa: PLC0415

    return render_report(outcome, spec.program, sys.stderr, os.environ)
