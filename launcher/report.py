"""What stands last on the terminal when a run did not simply succeed: at most 20 lines, whatever the workers printed.

`format_report` decides from values; `render_report` makes text of it. What came from workers is stripped of control
characters and cut to the terminal's width.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

from dlaunch.outcome import Attempt, ExceptionInfo, Failure, FailureKind, Outcome, RunState, TracebackFrame, signal_name
from dlaunch.spec import Program, ProgramKind

from .colour import is_coloured
from .hints import hint
from .text import cut, printable
from .traceback_frames import own_frames

MAX_LINES = 20
WIDTH_WITHOUT_TERMINAL = 200
_LEAST_WIDTH = 40
_FRAMES = 4  # the innermost
_MESSAGE_LINES = 2
_SENTENCE_LINES = 2
_OUTPUT_LINES = 4
_INDENT = 12

Style = Literal["plain", "headline", "quiet"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report: a label (or spaces) and its text."""

    text: str
    label: str = ""
    style: Style = "plain"

    def __str__(self) -> str:
        return f"{self.label}{self.text}"


def format_report(outcome: Outcome, program: Program, width: int) -> list[Line]:
    """The lines to print, each at most ``width`` cells but for the path of the log, which is of no use when cut."""
    match outcome.state:
        case RunState.SUCCEEDED:
            lines = [_success(outcome)] if outcome.restarts_used else []
        case RunState.INTERRUPTED:
            lines = [_interruption(outcome)]
        case RunState.FAILED:
            return list(_failure(outcome, program.kind, max(width, _LEAST_WIDTH)))
    return [Line(cut(line, max(width, _LEAST_WIDTH))) for line in lines]


def _success(outcome: Outcome) -> str:
    used = outcome.restarts_used
    causes = [attempt.root_cause for attempt in outcome.attempts if attempt.root_cause]
    why = f"; the last one because {_what_happened(causes[-1])}" if causes else ""
    return f"dlaunch: succeeded after {used} of {outcome.max_restarts} restarts{why}."


def _interruption(outcome: Outcome) -> str:
    by = f" by {signal_name(outcome.signal)}" if outcome.signal else ""
    lasted = _duration(outcome.ended_at - outcome.started_at)
    return f"dlaunch: interrupted{by} after {lasted}; {_count(outcome.world_size, 'worker')} stopped."


def _failure(outcome: Outcome, kind: ProgramKind, width: int) -> Iterator[Line]:
    cause, room = outcome.root_cause, width - _INDENT
    if cause is None:
        yield Line(cut(f"dlaunch: the job failed: {printable(outcome.reason)}", width), style="headline")
        return
    headline = f"dlaunch: the job failed: {_what_happened(cause)}"
    yield Line(cut(headline, width), style="headline")
    yield from _block("where", [_where(cause)], room)
    if cause.exception is not None:
        first_was_cut = cut(headline, width) != headline
        yield from _block("message", _rest_of_message(cause.exception, first_was_cut, room), room)
        yield from _block("at", map(_place, own_frames(cause.exception.frames)[-_FRAMES:]), room)
    elif cause.detail and cause.kind not in (FailureKind.NOT_STARTED, FailureKind.INFRASTRUCTURE):
        yield from _block("detail", [printable(cause.detail)], room)
    yield from _block("others", _others(outcome.attempts[-1]), room)
    yield from _block("attempts", _wrapped(_attempts(outcome), room), room)
    yield from _block("output", _last_output(cause), room, style="quiet")
    elsewhere = "" if cause.node == outcome.node else f" on {printable(cause.node)}"
    yield from _block("log", [printable(cause.log_file) + elsewhere] if cause.log_file else [], room=None)
    yield from _block("hint", _wrapped(hint(cause, kind), room), room)


def _block(name: str, texts: Iterable[str], room: int | None, style: Style = "plain") -> Iterator[Line]:
    """The name before the first line, spaces before the others; cut to ``room`` cells, if that is given."""
    label = f"  {name:<{_INDENT - 2}}"
    for text in texts:
        yield Line(text if room is None else cut(text, room), label, style)
        label = " " * _INDENT


def _what_happened(cause: Failure) -> str:
    who = "a process of dlaunch" if cause.rank is None else f"rank {cause.rank}"
    match cause.kind:
        case FailureKind.EXCEPTION if cause.exception is not None:
            first = next(iter(_message_lines(cause.exception)), "")
            return f"{who} raised {printable(cause.exception.type)}{f': {first}' if first else ''}"
        case FailureKind.OOM_KILL:
            return f"{who} was killed by the kernel, which had run out of memory"
        case FailureKind.NOT_STARTED:
            return f"{who} could not be started: {printable(cause.detail)}"
        case FailureKind.INFRASTRUCTURE if cause.detail:
            return printable(cause.detail)
        case _:
            how = "was ended by" if cause.status and cause.status.signal else "ended with"
            return f"{who} {how} {cause.status or 'an unknown status'}"


def _where(cause: Failure) -> str:
    who = f"rank {cause.rank} (local rank {cause.local_rank})" if cause.rank is not None else "outside of the workers"
    pid = f", pid {cause.pid}" if cause.pid is not None else ""
    return f"{who} on {printable(cause.node)}{pid}, {_duration(cause.lifetime_s)} into attempt {cause.attempt}"


def _message_lines(exception: ExceptionInfo) -> list[str]:
    return [line for raw in exception.message.splitlines() if (line := printable(raw).strip())]


def _rest_of_message(exception: ExceptionInfo, first_was_cut: bool, room: int) -> list[str]:
    """What the headline does not show of the message."""
    lines = _message_lines(exception)
    shown = lines[:1] if first_was_cut else []
    return [piece for line in [*shown, *lines[1:]] for piece in _wrapped(line, room)][:_MESSAGE_LINES]


def _place(frame: TracebackFrame) -> str:
    source = f": {printable(frame.source).strip()}" if frame.source else ""
    return f"{printable(_from_here(frame.file))}:{frame.line} in {printable(frame.function)}{source}"


def _from_here(file: str) -> str:
    """A path below the current folder without that folder's name."""
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed meanwhile
        return file
    return file.removeprefix(here.rstrip("/") + "/")


def _others(attempt: Attempt) -> list[str]:
    return [f"{_count(attempt.victims, 'other worker')} stopped because of it"] if attempt.victims else []


def _attempts(outcome: Outcome) -> str:
    return f"{len(outcome.attempts)}: {printable(outcome.reason)}"


def _last_output(cause: Failure) -> list[str]:
    """The last lines of the failed rank, without those of the traceback that is shown as frames."""
    traceback = cause.exception.traceback.splitlines() if cause.exception else []
    hidden = {"", *(printable(line).strip() for line in traceback)}
    lines = [_as_last_seen(line) for line in cause.last_output]
    return [line for line in lines if line.strip() not in hidden][-_OUTPUT_LINES:]


def _as_last_seen(line: str) -> str:
    """Of a progress bar that overwrote itself, what it showed last."""
    return printable(line.rstrip().rpartition("\r")[2]).rstrip()


def _wrapped(sentence: str, room: int) -> list[str]:
    """At most two lines, of which the last may be too long."""
    lines = textwrap.wrap(sentence, room)
    if len(lines) > _SENTENCE_LINES:
        lines = [*lines[: _SENTENCE_LINES - 1], " ".join(lines[_SENTENCE_LINES - 1 :])]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} was" if number == 1 else f"{number} {noun}s were"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def render_report(outcome: Outcome, program: Program, stream: TextIO | None, environ: Mapping[str, str]) -> str:
    """The report as text for ``stream``, in colour where it shows it; empty where there is nothing to say."""
    lines = format_report(outcome, program, _width_of(stream))
    if len(lines) > 1 and is_coloured(stream is not None and stream.isatty(), environ):
        return _coloured(lines)
    return "".join(f"{line}\n" for line in lines)


def _width_of(stream: TextIO | None) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80 if stream else WIDTH_WITHOUT_TERMINAL
    except (OSError, ValueError):
        return WIDTH_WITHOUT_TERMINAL


def _coloured(lines: Iterable[Line]) -> str:
    from io import StringIO  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415  -- 60 ms that only a failure on a terminal pays for
    from rich.text import Text  # noqa: PLC0415

    styles: dict[Style, str] = {"plain": "", "headline": "bold red", "quiet": "dim"}
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    with console.capture() as capture:
        for line in lines:
            console.print(Text.assemble((line.label, "bold"), (line.text, styles[line.style])))
    return capture.get()
