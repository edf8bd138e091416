"""The agent's end of a worker's side channel: what the worker's own interpreter says of its end."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from dlaunch import frames
from dlaunch.outcome import ExceptionInfo, TracebackFrame

_MAX_TEXT = 64 * 1024


class WorkerChannel:
    """Collects a worker's frames. The worker is a user's program: garbage closes the channel and harms nobody."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.exception: ExceptionInfo | None = None
        self.failing = False  # the exception surely ends it
        self.failed_at: float | None = None
        self.finalized = False
        self.late_variables: tuple[str, ...] = ()
        self._reader = frames.FrameReader()

    def read(self) -> bool:
        """Take in what has arrived; False when nothing more can come."""
        while True:
            try:
                data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data or not self._take(data):
                return False

    def close(self) -> None:
        """Forget the socket."""
        self.socket.close()

    def _take(self, data: bytes) -> bool:
        try:
            for frame in self._reader.feed(data):
                self._hear(frame)
        except (frames.FrameError, KeyError, TypeError, ValueError):
            return False
        return True

    def _hear(self, frame: frames.Frame) -> None:
        if frame["kind"] == "exception":
            self.exception = exception_info(frame)
            self.failing = frame.get("uncaught") is True
            self.failed_at = float(frame["at"])
        elif frame["kind"] == "finalizing":
            self.finalized = True
            self.late_variables = tuple(str(name)[:100] for name in frame.get("late_variables", ())[:20])
            if self.failed_at is None:
                self.failed_at = float(frame["at"])


def exception_info(frame: frames.Frame) -> ExceptionInfo:
    """The exception in a frame; raises TypeError or ValueError where it is not one."""
    return ExceptionInfo(
        type=str(frame.get("type", ""))[:200],
        message=str(frame.get("message", ""))[:_MAX_TEXT],
        frames=tuple(_traceback_frame(entry) for entry in frame.get("frames", ())),
        traceback=str(frame.get("traceback", ""))[:_MAX_TEXT],
    )


def exception_from_file(path: Path | None) -> ExceptionInfo | None:
    """What torch's ``@record`` (or a worker without a channel) left in its error file, if anything."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(4 * _MAX_TEXT))
        message: Any = document["message"]
        text = message if isinstance(message, str) else str(message["message"])
        trace = "" if isinstance(message, str) else str(message.get("extraInfo", {}).get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    kind, _, rest = text.partition(": ")
    return ExceptionInfo(type=kind[:200], message=rest[:_MAX_TEXT], traceback=trace[:_MAX_TEXT])


def _traceback_frame(entry: Any) -> TracebackFrame:
    file, line, function, source = entry
    return TracebackFrame(str(file), int(line), str(function), str(source)[:1000])
