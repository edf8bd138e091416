"""Files that survive a crash: written, flushed to the disk, and only then given their name."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the size in bytes and the CRC-32 of the content."""

    size: int
    crc32: int


class ChecksummedFile:
    """A write-only binary file that computes its checksum on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None  # torch's zip writer turns it into a RuntimeError without the cause

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``; raises OSError and keeps it in ``error``."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


def write_durably(path: Path, write: Callable[[ChecksummedFile], object]) -> Written:
    """Create ``path`` with what ``write`` writes, and return when it is on the disk.

    Raises:
        OSError: it could not be written (with the path in it).
    """
    with path.open("xb", buffering=0) as raw:
        file = ChecksummedFile(raw)
        try:
            write(file)
        except Exception as error:
            if file.error is None:
                raise
            raise OSError(file.error.errno, file.error.strerror, str(path)) from error
        os.fsync(raw.fileno())
    return Written(file.size, file.crc32)


def write_whole(path: Path, content: bytes) -> None:
    """Create or replace ``path`` so that a reader finds all of ``content``, or what was there before.

    Nothing is touched once the name is there: who finds it may move the directory.
    """
    unnamed = path.with_name(f".{path.name}.{os.getpid()}.new")
    unnamed.unlink(missing_ok=True)
    write_durably(unnamed, lambda file: file.write(content))
    unnamed.rename(path)


def checksum(path: Path) -> Written:
    """Size and checksum of an existing file; raises OSError."""
    size = crc32 = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return Written(size, crc32)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
