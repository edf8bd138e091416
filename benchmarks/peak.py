"""The most memory that this process had at once, watched by a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path

LOOK_EVERY_S = 0.001


def proportional_bytes() -> int:
    """This process's memory, with each page that several processes share divided by their number (PSS)."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


class Peak:
    """The highest proportional memory, in bytes, while the block runs."""

    def __init__(self) -> None:
        self.highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.highest = max(self.highest, proportional_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
