"""How a worker's own interpreter tells its agent of its end, without the script being able to notice.

CPython stores an uncaught exception in ``sys.last_value`` before it calls ``sys.excepthook``, whatever that is. So a
callback that was registered with ``atexit`` before all others, and therefore runs last, finds it there. SystemExit
leaves nothing there; ``os._exit`` and signals skip the callback, which is how the agent tells them apart.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

from dlaunch.clock import now

from .exception import describe, is_uncaught
from .late import late_variables

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Capture:
    """The error capture of one worker. Made before anything else runs; asleep until `begin`."""

    def __init__(self) -> None:
        self._worker = 0  # process id; a child that the script forks is not the worker
        self._channel = -1
        self._identity: tuple[int, int] = (0, 0)
        self._error_file = ""
        self._before: dict[str, str] | None = None
        atexit.register(self._at_exit)

    def begin(self, channel: int, *, note_late_variables: bool = False) -> None:
        """From now on this process is the worker, with ``channel`` (a socket) to its agent."""
        self._worker = os.getpid()
        self._channel = channel
        self._identity = _identity(channel)
        self._error_file = os.environ.get(ERROR_FILE, "")
        self._before = dict(os.environ) if note_late_variables else None

    def _at_exit(self) -> None:
        if os.getpid() != self._worker:
            return
        try:
            self._tell()
        except BaseException:
            return  # a script's end must not show a trace of ours, Ctrl-C included

    def _tell(self) -> None:
        at = now()
        late = [] if self._before is None else late_variables(self._before, os.environ)
        data = b""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and _may_describe(error):
            told, uncaught = describe(error), is_uncaught(error)
            if uncaught or error.__traceback__ is None:  # a script that cannot be compiled has no frame
                self._write_error_file(told)
            data = _frame({"kind": "exception", "at": at, "uncaught": uncaught, **told})
        self._send(data + _finalizing(at, late))

    def _send(self, data: bytes) -> None:
        """Write to the channel, unless the script closed it and opened something else under its number."""
        if _identity(self._channel) != self._identity:
            return
        import _socket  # noqa: PLC0415  -- and not socket: a script's folder may have a module of that name

        channel = _socket.socket(fileno=self._channel)
        sent = 0
        while sent < len(data):
            sent += channel.send(data[sent:], _socket.MSG_NOSIGNAL)
        channel.detach()

    def _write_error_file(self, told: dict[str, Any]) -> None:
        """Where torch's ``@record`` would have written, in its format, unless it has."""
        if not self._error_file:
            return
        import json  # noqa: PLC0415

        extra = {"py_callstack": told["traceback"], "timestamp": str(int(time.time()))}
        message = {"message": f"{told['type']}: {told['message']}", "extraInfo": extra}
        try:
            with open(self._error_file, "a", encoding="utf-8") as file:  # noqa: PTH123
                if file.tell() == 0:
                    json.dump({"message": message}, file)
        except OSError:
            pass  # the agent hears of the exception through the channel


def _may_describe(error: BaseException) -> bool:
    """Whether the words for it can be found without changing how the process ends.

    CPython ends a process by SIGINT after a KeyboardInterrupt, unless it evaluates a string in between (which resets
    _PyRuntime.signals.unhandled_keyboard_interrupt), as the import of many a standard module does (namedtuple).
    """
    return not isinstance(error, KeyboardInterrupt) or sys.modules.keys() >= {"json", "linecache", "traceback"}


def _finalizing(at: float, late: list[str]) -> bytes:
    names = ",".join(f'"{name}"' for name in late)  # late.py lets no others than identifiers through
    return _framed(f'{{"kind":"finalizing","at":{at!r},"late_variables":[{names}]}}')


def _frame(frame: dict[str, Any]) -> bytes:
    import json  # noqa: PLC0415

    return _framed(json.dumps(frame, ensure_ascii=False))


def _framed(body: str) -> bytes:
    """As dlaunch.frames does it, which is not imported at a worker's start for the time that takes."""
    data = body.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(4, "big") + data


def _identity(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:
        return (-1, -1)
    return status.st_dev, status.st_ino
