"""A log file that may fail or hang, without any harm to the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .writer import FileWriter

BATCH_BYTES = 1024 * 1024  # written at a time
MOST_PIECES = 1024  # of a batch: what writev(2) takes at once


class LogFile:
    """Bytes go to the end of ``path`` as they come. The first error ends the file, with a marker and one notice.

    The writer's thread does all that touches the file; ``notice`` may be called there. Nothing here waits for it.
    """

    def __init__(self, path: Path, notice: Callable[[str], None], writer: FileWriter) -> None:
        self.path = path
        self._notice = notice
        self._writer = writer
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_queued = False
        self._is_closed = False
        self._is_busy = False
        self._is_done = False
        self._lost = False  # some bytes were not even held
        self._file: _File | None = None  # the thread's alone
        with writer.changed:
            writer.opened(1)
            writer.enqueue(self._open)

    @property
    def has_room(self) -> bool:
        """Whether more should be written now. What is written all the same is held too, up to a bound."""
        return self._writer.has_room(self._held_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether something that was to be written is not in the file yet."""
        return self._held_bytes > 0

    @property
    def is_busy(self) -> bool:
        """Whether the thread is at work on this very file: if nothing goes on, it is the one that hangs."""
        return self._is_busy

    @property
    def is_done(self) -> bool:
        """Whether the file is closed, and all that could be written is in it."""
        return self._is_done

    def write(self, data: bytes) -> None:
        """Append ``data``; after an error, or when the file is closed, do nothing."""
        if self._is_closed or not data:
            return
        with self._writer.changed:
            if self._lost or self._writer.is_overfull:
                lost_before, self._lost = self._lost, True
            else:
                self._held.append(data)
                self._held_bytes += len(data)
                self._writer.hold(len(data))
                self._queue()
                return
        if not lost_before:
            self._notice(
                f"{self.path} is not written in time; the job goes on, and what comes now is not in that file."
            )

    def close(self) -> None:
        """Close the file behind all that was written; writing to it does nothing from here on."""
        with self._writer.changed:
            if not self._is_closed:
                self._is_closed = True
                self._queue()

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._writer.enqueue(self._write_held)

    # --- in the writer's thread ----------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_busy = True
        self._file = _File(self.path, self._notice)
        self._is_busy = False

    def _write_held(self) -> None:
        with self._writer.changed:
            held, self._held = self._held, []
            is_closed, self._is_queued = self._is_closed, False
            self._is_busy = True
        assert self._file
        for batch in _batches(held):
            self._file.write(batch)
            size = sum(map(len, batch))
            with self._writer.changed:
                self._held_bytes -= size
                self._writer.hold(-size)
        if is_closed:
            self._file.close("the file system did not keep up" if self._lost else "")
            with self._writer.changed:
                self._writer.opened(-1)
                self._is_done = True
        self._is_busy = False


class _File:
    """The file itself."""

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self._path = path
        self._notice = notice
        self._fd: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Appended to: whatever an earlier attempt left here stays.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            notice(f"{path} cannot be opened ({error.strerror}); the job goes on without it.")

    def write(self, pieces: Sequence[bytes]) -> None:
        if self._fd is None:
            return
        try:
            written = os.writev(self._fd, pieces)
            if written < sum(map(len, pieces)):
                _write_all(self._fd, memoryview(b"".join(pieces))[written:])
        except OSError as error:
            reason = error.strerror or str(error)
            self.close(reason)
            sentence = f"{self._path} cannot be written ({reason}); the job goes on, and the rest is not in that file."
            self._notice(sentence)

    def close(self, cut_because: str = "") -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # a deferred write error too: what could be kept is kept
            if cut_because:
                _write_marker(
                    fd, f"\n[dlaunch: this file ends here, the rest could not be written: {cut_because}]\n".encode()
                )
        with contextlib.suppress(OSError):
            os.close(fd)


def _batches(held: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The same in batches, each worth a system call: at most MOST_PIECES, and not much more than BATCH_BYTES."""
    batch: list[bytes] = []
    size = 0
    for data in held:
        batch.append(data)
        size += len(data)
        if size >= BATCH_BYTES or len(batch) == MOST_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _write_marker(fd: int, marker: bytes) -> None:
    """Append the marker, or where there is no room put it over the last bytes, which are incomplete anyway."""
    size = os.fstat(fd).st_size
    try:
        if os.write(fd, marker) == len(marker):
            return
    except OSError:
        pass
    os.ftruncate(fd, max(0, size - len(marker)))
    os.write(fd, marker)
