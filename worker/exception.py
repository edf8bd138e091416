"""An uncaught exception in words and frames: bounded, and robust against whatever a script has done to it.

It is imported at every worker's start and used at few workers' end, so it imports nothing before it is used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from traceback import TracebackException
    from typing import Any

MAX_TRACEBACK = 64 * 1024  # characters
MAX_MESSAGE = 8 * 1024
MAX_CHUNK = 8 * 1024  # of the traceback, which comes in one for each frame and one for the message
MAX_SOURCE = 300
OUTER_FRAMES, INNER_FRAMES = 10, 30  # of a deeper stack the middle is left out: recursion without end

_ABOVE_THE_SCRIPT = ("<frozen runpy>", "/runpy.py")  # the frames that ``python -m`` and zips add


def describe(error: BaseException) -> dict[str, Any]:
    """The fields of an "exception" frame: type, message, frames (outermost first), traceback."""
    import traceback  # noqa: PLC0415

    told = traceback.TracebackException(type(error), error, error.__traceback__)
    return {
        "type": type_name(type(error)),
        "message": shorten(_text(error), MAX_MESSAGE),
        "frames": _frames(told, error),
        "traceback": _bounded(told),
    }


def is_uncaught(error: BaseException) -> bool:
    """Whether ``error`` surely went through the script's top level, and so ends the script.

    Consoles, test runners and debuggers leave errors in ``sys.last_value`` too, of scripts that go on to succeed.
    """
    import sys  # noqa: PLC0415

    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename.endswith(_ABOVE_THE_SCRIPT):
        entry = entry.tb_next
    if entry is None:
        return False
    code = entry.tb_frame.f_code
    is_main = entry.tb_frame.f_globals is getattr(sys.modules.get("__main__"), "__dict__", None)
    return is_main and code.co_name == "<module>" and not code.co_filename.startswith("<")


def type_name(kind: type[BaseException]) -> str:
    """The name as CPython's own traceback has it: with its module, unless that goes without saying."""
    module = getattr(kind, "__module__", None)
    name = str(getattr(kind, "__qualname__", kind.__name__))
    return name if module in {"builtins", "__main__"} else f"{module}.{name}"


def shorten(text: str, length: int) -> str:
    """``text`` with its middle left out where it is longer than ``length``; what counts stands at the two ends."""
    if len(text) <= length:
        return text
    head, tail = length * 3 // 4, length // 4
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # CPython's words


def _frames(told: TracebackException, error: BaseException) -> list[list[Any]]:
    stack = list(told.stack)
    while stack and stack[0].filename.endswith(_ABOVE_THE_SCRIPT):
        del stack[0]
    if len(stack) > OUTER_FRAMES + INNER_FRAMES:
        stack = stack[:OUTER_FRAMES] + stack[-INNER_FRAMES:]
    frames = [[frame.filename, frame.lineno or 0, frame.name, (frame.line or "")[:MAX_SOURCE]] for frame in stack]
    if isinstance(error, SyntaxError) and error.filename:  # the place of the mistake is no frame: it never ran
        frames.append([str(error.filename), error.lineno or 0, "<module>", str(error.text or "").strip()[:MAX_SOURCE]])
    return frames


def _bounded(told: TracebackException) -> str:
    text = "".join(shorten(chunk, MAX_CHUNK) for chunk in told.format())
    if len(text) <= MAX_TRACEBACK:
        return text
    head = MAX_TRACEBACK // 4  # the exception that ended it all stands last
    return f"{text[:head]}\n[... the middle of {len(text)} characters is left out ...]\n{text[head - MAX_TRACEBACK :]}"
