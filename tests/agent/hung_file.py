"""A file that takes some bytes and then hangs, as on a file system that does not answer: a pipe that nobody reads."""

from __future__ import annotations

import os
from pathlib import Path


def hang(path: Path) -> Path:
    """Put such a file there; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def read_all(path: Path, size: int) -> bytes:
    """Have it go on: what is written to it, ``size`` bytes in all."""
    found = b""
    with path.open("rb", buffering=0) as file:
        while len(found) < size:
            found += file.read(1 << 20)
    return found
