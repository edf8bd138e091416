"""The terminal, or whatever stdout and stderr are, as the agent sees it: it takes any amount and never blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from enum import Enum
from types import TracebackType

from dlaunch.agent.console import Stream
from dlaunch.agent.prefix import console_prefix
from dlaunch.environ import Place
from dlaunch.spec import JobSpec

from .colour import closed, in_bold, in_rank_colour, is_coloured
from .spool import Spool

_FDS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_WRITE_BYTES = 256 * 1024
_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class _State(Enum):
    OPEN = "open"
    CLOSING = "closing"  # the thread writes what is left, and ends
    CLOSED = "closed"  # nothing is taken, and nothing written


class Terminal:
    """Implements ``dlaunch.agent.console.Console`` with one thread that writes what a queue holds.

    The descriptors are written to as they are: they are shared with the shell and others, so their flags are not ours
    to change, and a slow reader blocks the thread. The queue then grows on disk. What is queued is written in order,
    stdout and stderr alike. A stream whose reader is gone (``| head``) is dropped without a word, and the job goes on.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._template = spec.output.line_prefix_template
        self._coloured = {stream: is_coloured(_is_terminal(fd), os.environ) for stream, fd in _FDS.items()}
        self._target = {stream: _target(fd) for stream, fd in _FDS.items()}
        self._in_line = dict.fromkeys(self._target.values(), False)  # whether its last line is unfinished
        self._gone = {stream for stream in _FDS if self._target[stream] is None}
        self._closing_colours: set[Stream] = set()  # streams whose lines come with a coloured prefix
        self._spool = Spool()
        self._refused_bytes = 0
        self._state = _State.OPEN
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefix(self, place: Place, stream: Stream, *, tee: bool) -> bytes:
        """What stands before each line of a worker on this stream, in the colour of its rank."""
        text = console_prefix(place, self._template, tee=tee).encode("utf-8", "surrogateescape")
        if not text or not self._coloured[stream]:
            return text
        self._closing_colours.add(stream)
        return in_rank_colour(text, place.rank)

    def write(self, stream: Stream, data: bytes) -> None:
        """Queue bytes; returns at once."""
        if stream in self._closing_colours:
            data = closed(data)
        with self._changed:
            self._put(stream, data)

    def notice(self, text: str) -> None:
        """Queue one line of dlaunch's own to stderr, on a line of its own."""
        name = in_bold(b"dlaunch:") if self._coloured["stderr"] else b"dlaunch:"
        self._put_own(b"%b %b\n" % (name, _encoded(" ".join(text.splitlines()))))

    def report(self, text: str) -> None:
        """Queue text of dlaunch's own to stderr as it is, on lines of its own."""
        self._put_own(_encoded(text if text.endswith("\n") else text + "\n"))

    def close(self) -> None:
        """Wait until all that is queued is written, or until ``abandon``. Then the terminal takes nothing more."""
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.CLOSING
            self._changed.notify_all()
            while self._thread is not None and self._state is _State.CLOSING:
                self._changed.wait()
            self._state = _State.CLOSED
            self._spool.clear()

    def abandon(self) -> None:
        """Do not wait for the reader any longer: what is queued is lost. May be called from a signal handler."""
        with self._changed:  # a lock that its own thread may take again
            self._state = _State.CLOSED
            self._changed.notify_all()

    def _put_own(self, lines: bytes) -> None:
        with self._changed:
            broken = self._in_line[self._target["stderr"]]
            self._put("stderr", b"\n" + lines if broken else lines)

    def _put(self, stream: Stream, data: bytes) -> None:
        if not data or self._state is _State.CLOSED or stream in self._gone:
            return
        if self._refused_bytes or not self._spool.put(stream, data):
            self._refused_bytes += len(data)  # and so is what follows, until the gap has been told in its place
            return
        self._in_line[self._target[stream]] = not data.endswith(b"\n")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dlaunch-terminal", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _tell_what_was_refused(self) -> None:
        count, self._refused_bytes = self._refused_bytes, 0
        self.notice(
            f"{count:,} bytes of output are missing here: nobody read them in time, and the temporary directory has "
            "no room for more. The log files have them."
        )

    def _run(self) -> None:
        """The thread's life: it ends when the terminal is closed and nothing is left to write."""
        while (block := self._next()) is not None:
            stream, data = block
            if stream in self._gone:
                continue
            try:
                _write_all(_FDS[stream], data)
            except OSError as error:
                self._drop(stream, error)
        with self._changed:
            self._thread = None
            self._changed.notify_all()

    def _next(self) -> tuple[Stream, bytes] | None:
        with self._changed:
            while self._state is not _State.CLOSED:
                if self._refused_bytes and len(self._spool) <= _WRITE_BYTES:
                    self._tell_what_was_refused()
                block = self._take()
                if block is not None or self._state is _State.CLOSING:
                    return block
                self._changed.wait()
            return None

    def _take(self) -> tuple[Stream, bytes] | None:
        try:
            return self._spool.take(_WRITE_BYTES)
        except OSError:  # what had gone to disk cannot be read back
            self._refused_bytes += len(self._spool)
            self._spool.clear()
            self._tell_what_was_refused()
            return self._spool.take(_WRITE_BYTES)

    def _drop(self, stream: Stream, error: OSError) -> None:
        with self._changed:
            self._gone.add(stream)
            if error.errno not in _READER_GONE:
                self.notice(f"{stream} cannot be written ({error.strerror}); the job goes on without it.")


def _is_terminal(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(fd)
    return False


def _target(fd: int) -> tuple[int, int] | None:
    """What a descriptor leads to, so that two that lead to the same are recognised; None for a closed one."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody else made what we share non-blocking
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
