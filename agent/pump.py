"""Carries the workers' output from their pipes to the log files and the console, chunk by chunk.

The agent's one loop drives it: each pipe is registered with the loop's selector, and the key's ``data`` is what to
call with the descriptor when it is readable. Nothing here waits for a worker, for a reader of the console, or, but for
the end of `close_all`, for a file system: a thread writes the log files (writer.py). Where that does not keep up, the
pipes of the files concerned are not read until it has, so that nothing is lost, and only who floods them waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import termios
from pathlib import Path

from dlaunch.clock import now
from dlaunch.environ import Place
from dlaunch.spec import OutputSpec

from .console import Console, Stream
from .layout import AttemptFiles, WorkerFiles
from .lines import ConsoleLines, WholeLines, with_prefix
from .logfile import LogFile
from .prefix import torchrun_prefix
from .tail import Tail
from .writer import FileWriter

PIPE_BYTES = 1024 * 1024  # what a worker can write while the agent is busy; Linux allows that much to everybody
CHUNK_BYTES = 256 * 1024  # the most that one rank gets carried before it is the next one's turn
LAST_WRITES_S = 5.0  # for a file system that does not answer at all when an attempt is over


class OutputPump:
    """All output of the workers of this node, one attempt after the other."""

    def __init__(
        self,
        spec: OutputSpec,
        console: Console,
        selector: selectors.BaseSelector,
        writer: FileWriter | None = None,
    ) -> None:
        self._spec = spec
        self._console = console
        self._selector = selector
        self._carriers: dict[int, _Carrier] = {}  # by the pipe's descriptor, while the pipe is open
        self._tails: dict[tuple[int, Stream], Tail] = {}
        self._filtered: dict[Path, LogFile] = {}
        self._writer = writer or FileWriter()
        self._unfinished: list[LogFile] = []  # of those that were opened, the ones that are not done
        self._paused: set[int] = set()  # pipes that wait for room
        self._room: int | None = None  # an eventfd that tells of it, while one does

    def open(self, place: Place, files: WorkerFiles, attempt: AttemptFiles) -> tuple[int, int]:
        """Pipes for a worker's stdout and stderr: returns the ends to write to, which the caller gives away and closes.

        Raises OSError when there are no descriptors left.
        """
        stdout = self._open("stdout", place, files.stdout, attempt.filtered_stdout)
        try:
            return stdout, self._open("stderr", place, files.stderr, attempt.filtered_stderr)
        except OSError:
            os.close(stdout)
            raise

    def on_readable(self, fd: int) -> None:
        """Carry what is in one pipe, up to a bound. Stops watching the pipe at its end."""
        carrier = self._carriers.get(fd)
        if carrier is None or (not carrier.has_room and self._pause(fd, carrier)):
            return
        if not carrier.carry(CHUNK_BYTES):
            self._close(fd)

    @property
    def due_at(self) -> float | None:
        """When (on dlaunch's clock) ``show_updates`` should be called; None when no progress bar waits."""
        times = [at for carrier in self._carriers.values() if (at := carrier.due_at) is not None]
        return min(times, default=None)

    def show_updates(self) -> None:
        """Show the state of progress bars that have waited long enough."""
        for carrier in self._carriers.values():
            carrier.show_update()

    def drain(self, local_rank: int) -> None:
        """Carry all that a worker has written so far; to be called when it has ended.

        Does not wait for the end of the pipe, which a process that the worker left behind may hold open: its output
        goes on being carried.
        """
        for fd, carrier in list(self._carriers.items()):
            if carrier.local_rank == local_rank and not carrier.carry_all():
                self._close(fd)

    def close_all(self, wait_s: float = LAST_WRITES_S) -> None:
        """Carry what is left of all workers, and close: the end of an attempt, when none of its processes lives.

        Returns when the files are complete. A file system from which nothing is heard for ``wait_s`` is not waited for
        any longer; its files are named to the user, and completed if it comes back. 0: do not wait, say nothing.
        """
        for fd, carrier in list(self._carriers.items()):
            carrier.carry_all()
            self._close(fd)
        for file in self._filtered.values():
            file.close()
        self._filtered.clear()
        if wait_s > 0 and not self._writer.wait(wait_s):
            self._name_unfinished()
        self._unfinished = [file for file in self._unfinished if not file.is_done]

    def _name_unfinished(self) -> None:
        late = [file for file in self._unfinished if not file.is_done and (file.is_behind or file.is_busy)]
        files = sorted(late, key=lambda file: not file.is_busy)  # the one that hangs comes first
        if files:
            which = f"{files[0].path}" if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
            why = "the file system does not answer"
            what = "what is missing is lost unless it does before dlaunch ends"
            self._console.notice(f"{which} cannot be completed: {why}; {what}.")

    def tail(self, local_rank: int, most: int) -> tuple[str, ...]:
        """The last lines of a worker, also after its end: stderr's, and if these are few, stdout's before them."""
        errors = self._lines_of(local_rank, "stderr", most)
        return self._lines_of(local_rank, "stdout", most - len(errors)) + errors

    def _lines_of(self, local_rank: int, stream: Stream, most: int) -> tuple[str, ...]:
        tail = self._tails.get((local_rank, stream))
        return tail.lines(most) if tail is not None else ()

    def _open(self, stream: Stream, place: Place, path: Path | None, filtered: Path | None) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)  # only this end: the writer's is a description of its own
        with contextlib.suppress(OSError):  # a user without privileges has a bound for all pipes together
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        tail = self._tails[place.local_rank, stream] = Tail()
        self._carriers[read_end] = _Carrier(
            read_end,
            place.local_rank,
            tail,
            self._log_file(path) if path is not None else None,
            self._sink(stream, place),
            self._filter(stream, place, filtered) if filtered is not None else None,
        )
        self._selector.register(read_end, selectors.EVENT_READ, self.on_readable)
        return write_end

    def _sink(self, stream: Stream, place: Place) -> _ToConsole | None:
        """How a stream gets to the console, if it does."""
        spec = self._spec
        tee = spec.tee.of(place.local_rank).includes(stream)
        redirected = spec.redirects.of(place.local_rank).includes(stream) and not tee
        hidden = spec.local_ranks_filter is not None and place.local_rank not in spec.local_ranks_filter
        if redirected or hidden:
            return None
        prefix = self._console.prefix(place, stream, tee=tee)
        if not prefix and place.world_size == 1:
            return _AsItComes(self._console, stream)
        return _InLines(self._console, stream, prefix)

    def _filter(self, stream: Stream, place: Place, path: Path) -> _Filter:
        if path not in self._filtered:
            self._filtered[path] = self._log_file(path)
        needles = self._spec.stdout_filters if stream == "stdout" else self._spec.stderr_filters
        prefix = torchrun_prefix(place, self._spec.line_prefix_template)
        return _Filter(self._filtered[path], needles, prefix.encode("utf-8", "surrogateescape"))

    def _log_file(self, path: Path) -> LogFile:
        file = LogFile(path, self._console.notice, self._writer)
        self._unfinished.append(file)
        return file

    def _pause(self, fd: int, carrier: _Carrier) -> bool:
        """Read a pipe no more until its files have room; False if they have by now."""
        if self._room is None:
            self._room = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._selector.register(self._room, selectors.EVENT_READ, self._on_room)
        self._writer.wake_when_there_is_room(self._room)
        if carrier.has_room:  # it was made before the writer knew that we wait
            self._unlisten()
            return False
        self._selector.unregister(fd)
        self._paused.add(fd)
        return True

    def _on_room(self, eventfd: int) -> None:
        """Read those pipes again whose files have room now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(eventfd)
        self._writer.wake_when_there_is_room(eventfd)
        for fd in [fd for fd in self._paused if self._carriers[fd].has_room]:
            self._paused.remove(fd)
            self._selector.register(fd, selectors.EVENT_READ, self.on_readable)
        self._unlisten()

    def _unlisten(self) -> None:
        """Hear of room no more, unless some pipe still waits for it."""
        if self._room is not None and not self._paused:
            self._writer.wake_when_there_is_room(None)
            self._selector.unregister(self._room)
            os.close(self._room)
            self._room = None

    def _close(self, fd: int) -> None:
        if fd in self._paused:
            self._paused.remove(fd)
            self._unlisten()
        else:
            self._selector.unregister(fd)
        self._carriers.pop(fd).close()


class _Carrier:
    """One stream of one worker: where its bytes come from, and all the places they go to."""

    def __init__(
        self, fd: int, local_rank: int, tail: Tail, file: LogFile | None, sink: _ToConsole | None, copy: _Filter | None
    ) -> None:
        self.local_rank = local_rank
        self._fd = fd
        self._tail = tail
        self._file = file
        self._sink = sink
        self._copy = copy

    @property
    def due_at(self) -> float | None:
        return self._sink.due_at if self._sink is not None else None

    @property
    def has_room(self) -> bool:
        """Whether the files take more."""
        return (self._file is None or self._file.has_room) and (self._copy is None or self._copy.has_room)

    def carry(self, most: int) -> bool:
        """Carry at most so many bytes, one read; False at the end of the pipe."""
        try:
            chunk = os.read(self._fd, most)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        if self._file is not None:
            self._file.write(chunk)
        self._tail.feed(chunk)
        if self._copy is not None:
            self._copy.feed(chunk)
        if self._sink is not None:
            self._sink.feed(chunk)
        return True

    def carry_all(self) -> bool:
        """Carry what is in the pipe now, and no more: its writer may never stop. False at the end of the pipe."""
        left = _bytes_in(self._fd)
        while left > 0:
            size = min(left, CHUNK_BYTES)
            self.carry(size)
            left -= size
        return self.carry(1)

    def show_update(self) -> None:
        if self._sink is not None:
            self._sink.show_update()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.finish()
        if self._copy is not None:
            self._copy.finish()
        if self._file is not None:
            self._file.close()
        os.close(self._fd)


def _bytes_in(fd: int) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))
    return int(size)


class _AsItComes:
    """The only worker of a job: its output passes through untouched, so a progress bar works as without dlaunch."""

    due_at: float | None = None

    def __init__(self, console: Console, stream: Stream) -> None:
        self._console = console
        self._stream = stream

    def feed(self, chunk: bytes) -> None:
        self._console.write(self._stream, chunk)

    def show_update(self) -> None:
        """Nothing waits here."""

    def finish(self) -> None:
        """Nothing is held here."""


class _InLines:
    """One of several workers: whole lines, each with its prefix."""

    def __init__(self, console: Console, stream: Stream, prefix: bytes) -> None:
        self._console = console
        self._stream = stream
        self._prefix = prefix
        self._lines = ConsoleLines()

    @property
    def due_at(self) -> float | None:
        return self._lines.due_at

    def feed(self, chunk: bytes) -> None:
        self._write(self._lines.feed(chunk, now()))

    def show_update(self) -> None:
        self._write(self._lines.update(now()))

    def finish(self) -> None:
        self._write(self._lines.finish())

    def _write(self, lines: bytes) -> None:
        if lines:
            self._console.write(self._stream, with_prefix(lines, self._prefix))


_ToConsole = _AsItComes | _InLines


class _Filter:
    """Copies the lines that contain one of the needles; as in torchrun, a carriage return ends a line here."""

    def __init__(self, file: LogFile, needles: tuple[str, ...], prefix: bytes) -> None:
        self._file = file
        self._needles = [needle.encode("utf-8", "surrogateescape") for needle in needles]
        self._prefix = prefix
        self._lines = WholeLines()

    @property
    def has_room(self) -> bool:
        return self._file.has_room

    def feed(self, chunk: bytes) -> None:
        self._copy(self._lines.feed(chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")))

    def finish(self) -> None:
        if rest := self._lines.take():
            self._copy(rest + b"\n")

    def _copy(self, lines: bytes) -> None:
        if not any(needle in lines for needle in self._needles):
            return
        chosen = [line for line in lines[:-1].split(b"\n") if any(needle in line for needle in self._needles)]
        self._file.write(with_prefix(b"".join(line + b"\n" for line in chosen), self._prefix))
