"""A log file that may fail, without any harm to the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


class LogFile:
    """Bytes go to the end of ``path`` as they come. The first error ends the file, with a marker and one notice."""

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

    def write(self, data: bytes) -> None:
        """Append ``data``; after an error, do nothing."""
        if self._fd is None or not data:
            return
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            self._give_up(self._fd, error.strerror or str(error))

    def close(self) -> None:
        """Close the file; writing to it does nothing from here on."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # a deferred write error: what could be kept is kept
                os.close(fd)

    def _give_up(self, fd: int, reason: str) -> None:
        marker = f"\n[dlaunch: this file ends here, the rest could not be written: {reason}]\n".encode()
        with contextlib.suppress(OSError):
            _write_marker(fd, marker)
        self.close()
        self._notice(f"{self._path} cannot be written ({reason}); the job goes on, and the rest is not in that file.")


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
