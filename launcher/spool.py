"""A queue of byte blocks that keeps little in memory and the rest in a file without a name."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections import deque
from pathlib import Path
from typing import IO

from dlaunch.agent.console import Stream

MEMORY_BYTES = 4 * 1024 * 1024
SEGMENT_BYTES = 64 * 1024 * 1024  # a file of this size is given back once it has been read
EMERGENCY_BYTES = 64 * 1024 * 1024  # held in memory when no file can be written; what comes on top is refused

_HEADER = struct.Struct("=BI")
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
_LONGEST_RECORD = 1024 * 1024 * 1024

Block = tuple[Stream, bytes]


class Spool:
    """First in, first out, over both streams. Not for several threads at once: its user has the lock.

    Blocks go to ``front`` while they fit into memory. Beyond that they go to ``back``, and from there in large pieces
    to files, which stand between the two in order.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, directory: Path | None = None) -> None:
        self._front_limit = memory_bytes * 3 // 4
        self._back_limit = memory_bytes - self._front_limit
        self._spill_above = self._back_limit
        self._directory = directory
        self._front = _Blocks()
        self._files: deque[_Segment] = deque()
        self._back = _Blocks()

    def __len__(self) -> int:
        """The bytes that wait."""
        return self._front.size + sum(file.size for file in self._files) + self._back.size

    def __bool__(self) -> bool:
        return bool(self._front.size or self._files or self._back.size)

    def put(self, stream: Stream, data: bytes) -> bool:
        """Add a block; False if it was refused, because the disk is full and so is the memory set aside for that."""
        if not (self._files or self._back.size) and self._front.size + len(data) <= self._front_limit:
            self._front.put(stream, data)
            return True
        if self._back.size + len(data) > max(EMERGENCY_BYTES, len(data)) and not self._spill():
            return False
        self._back.put(stream, data)
        if self._back.size > self._spill_above:
            self._spill()
        return True

    def take(self, most: int) -> Block | None:
        """The next bytes, at most ``most`` and all of one stream; None when nothing waits.

        Raises OSError when the file cannot be read: what waits is lost then, and only ``clear`` helps.
        """
        self._move_up()  # a block that had no room in an empty front went to the back
        block = self._take_from_file(most) if self._files and not self._front.size else self._front.take(most)
        self._move_up()
        return block

    def clear(self) -> None:
        """Forget all that waits."""
        while self._files:
            self._files.popleft().close()
        self._front, self._back = _Blocks(), _Blocks()

    def _move_up(self) -> None:
        if not (self._front.size or self._files):
            self._front, self._back = self._back, self._front

    def _take_from_file(self, most: int) -> Block:
        block = self._files[0].take(most)
        if not self._files[0].size:
            self._files.popleft().close()
        return block

    def _spill(self) -> bool:
        """Move ``back`` to a file; False, with nothing changed, when that cannot be done."""
        try:
            if not self._files or self._files[-1].written > SEGMENT_BYTES:
                self._files.append(_Segment(self._directory))
            self._files[-1].append(self._back)
        except OSError:
            if self._files and not self._files[-1].size:
                self._files.pop().close()
            self._spill_above = self._back.size + self._back_limit  # not again with each block
            return False
        self._back, self._spill_above = _Blocks(), self._back_limit
        return True


class _Blocks:
    """Blocks in memory."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self.size = 0

    def put(self, stream: Stream, data: bytes) -> None:
        if data:
            self._blocks.append((stream, data))
            self.size += len(data)

    def take(self, most: int) -> Block | None:
        """The next blocks of one stream, joined; a block that alone is too long is cut."""
        if not self._blocks:
            return None
        stream, first = self._blocks.popleft()
        if len(first) > most:
            self._blocks.appendleft((stream, first[most:]))
            first = first[:most]
        pieces, size = [first], len(first)
        while self._blocks and self._blocks[0][0] == stream and size + len(self._blocks[0][1]) <= most:
            pieces.append(self._blocks.popleft()[1])
            size += len(pieces[-1])
        self.size -= size
        return stream, first if len(pieces) == 1 else b"".join(pieces)


class _Segment:
    """One file: records of a stream, a length and so many bytes. It has no name, so nothing is left of it ever."""

    def __init__(self, directory: Path | None) -> None:
        import tempfile  # noqa: PLC0415  -- costs some ms at start-up, and few runs need it

        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115  -- `close` closes it
            prefix="dlaunch-", dir=directory, buffering=0
        )
        self._fd = self._file.fileno()
        self._read_at = 0
        self._record: tuple[Stream, int] | None = None  # the record being read: its stream, and the bytes left
        self.written = 0
        self.size = 0  # bytes that wait, headers not counted

    def append(self, blocks: _Blocks) -> None:
        """Write all blocks at the end, or none: raises OSError, and then ``blocks`` is as it was."""
        size, records = blocks.size, []
        while (block := blocks.take(_LONGEST_RECORD)) is not None:
            records.append(block)
        try:
            end = self.written
            for stream, data in records:
                end = _write_at(self._fd, _HEADER.pack(_STREAMS.index(stream), len(data)), end)
                end = _write_at(self._fd, data, end)
        except OSError:
            for stream, data in records:
                blocks.put(stream, data)
            raise
        self.written = end
        self.size += size

    def take(self, most: int) -> Block:
        """The next bytes of a record; there must be some."""
        stream, left = self._record or self._next_record()
        data = os.pread(self._fd, min(most, left), self._read_at)
        if not data:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._read_at += len(data)
        self._record = (stream, left - len(data)) if len(data) < left else None
        self.size -= len(data)
        return stream, data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _next_record(self) -> tuple[Stream, int]:
        index, length = _HEADER.unpack(os.pread(self._fd, _HEADER.size, self._read_at))
        self._read_at += _HEADER.size
        return _STREAMS[index], length


def _write_at(fd: int, data: bytes, at: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
    return at
