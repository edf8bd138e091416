"""Whether what happened in a chaos scenario is what must happen: a list of complaints. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos_run import Observation
from expectation import Ending

REPORT_LINES = 20
_SOURCES = Path(__file__).resolve().parent.parent
_OUR_FRAME = re.compile(rf'File "{re.escape(str(_SOURCES))}/(agent|dlaunch|launcher|worker)/.*')
_OUR_MISTAKE = "this is a bug of dlaunch"
_REPORT_STARTS = re.compile(r"^dlaunch: (the job failed|succeeded after|interrupted)", re.MULTILINE)


def complaints(seen: Observation, endings: Sequence[Ending]) -> list[str]:
    """Everything that is wrong, in sentences; empty where all is right."""
    if seen.trouble:
        return [seen.trouble, *_leftovers(seen)]
    return [*_leftovers(seen), *_ending(seen, endings), *_output(seen)]


def _leftovers(seen: Observation) -> Iterator[str]:
    for process in seen.left:
        yield f"left behind: {process}"


def _ending(seen: Observation, endings: Sequence[Ending]) -> Iterator[str]:
    if not any(_is(ending, seen) for ending in endings):
        yield f"it came to {_tell(seen)}"
        for ending in endings:
            yield f"  expected: {ending}"
    if seen.summary and seen.summary["state"] not in ("refused", "crashed"):
        yield from _contradictions(seen.summary, seen.returncode)


def _is(ending: Ending, seen: Observation) -> bool:
    if seen.returncode != ending.returncode:
        return False
    if seen.summary is None or ending.state is None:
        return seen.summary is None and ending.state is None
    alike = seen.summary["state"] == ending.state and seen.summary.get("restarts_used") == ending.restarts
    return alike and (ending.state == "interrupted" or _blames(_last_cause(seen.summary), ending.cause))


def _last_cause(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Of the last attempt that failed, whether or not the run did."""
    causes = [attempt["root_cause"] for attempt in summary["attempts"] if attempt["root_cause"]]
    return causes[-1] if causes else None


def _blames(cause: dict[str, Any] | None, wanted: str) -> bool:
    if not wanted or cause is None:
        return not wanted and cause is None
    if wanted == "infrastructure":
        return bool(cause["kind"] == "infrastructure")
    return cause["rank"] is not None and wanted in ("any rank", f"rank {cause['rank']}")


def _contradictions(summary: dict[str, Any], returncode: int | None) -> Iterator[str]:
    if returncode is not None and returncode >= 0 and summary["exit_code"] != returncode:
        yield f"the summary says exit code {summary['exit_code']}, the process ended with {returncode}"
    failed = [attempt for attempt in summary["attempts"] if attempt["root_cause"]]
    if summary["state"] == "succeeded" and len(failed) != summary["restarts_used"]:
        yield f"{summary['restarts_used']} restarts, but {len(failed)} failed attempts"


def _output(seen: Observation) -> Iterator[str]:
    for frame in _OUR_FRAME.findall(seen.output)[:1]:
        yield f"the output shows a frame of dlaunch's own ({frame})"
    if _OUR_MISTAKE in seen.output:
        yield f"the output says '{_OUR_MISTAKE}'"
    state = seen.summary["state"] if seen.summary else None
    start = list(_REPORT_STARTS.finditer(seen.output))
    if state in ("failed", "interrupted") and not start and (seen.returncode or 0) > 0:
        yield "there is no report at the end of the output"
    if start and (lines := seen.output[start[-1].start() :].count("\n")) > REPORT_LINES:
        yield f"the report has {lines} lines, or something was printed after it"


def _tell(seen: Observation) -> str:
    if seen.summary is None:
        return f"exit {seen.returncode}, no summary"
    summary, cause = seen.summary, _last_cause(seen.summary) if "attempts" in seen.summary else None
    blamed = f", blaming {cause['kind']} of rank {cause['rank']} ({cause['detail']})" if cause else ""
    used = summary.get("restarts_used")
    return f"exit {seen.returncode}, {summary['state']}, restarts used {used}{blamed}: {summary['reason']}"
