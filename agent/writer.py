"""The one thread that waits for file systems, so that the agent's loop never does: a hung one must not stop it.

What is to be written is held in memory meanwhile, up to a bound; whoever writes much looks at `has_room` first and
waits for a wake-up where there is none. The thread lives while a file is open or something is to be done.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from dlaunch.clock import now

HELD_BYTES = 64 * 1024 * 1024  # of all files together
LEAST_SHARE = 256 * 1024  # of one file, however many there are
LONGEST_WAIT_S = 60.0  # for a file system that is slow but goes on

Job = Callable[[], None]


class FileWriter:
    """Does jobs one after the other, each in the order in which it was asked for. The jobs raise nothing."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self.changed = threading.Condition(
            threading.Lock()
        )  # guards all that the thread shares with the loop, of jobs too
        self._held_bytes = held_bytes
        self._held = 0
        self._files = 0
        self._jobs: deque[Job] = deque()
        self._at_work = False
        self._progress = 0  # counts jobs done and pieces written
        self._waiters = 0
        self._wake_fd: int | None = None
        self._thread: threading.Thread | None = None

    # --- the loop's side -----------------------------------------------------------------------------------------

    def do(self, job: Job) -> None:
        """Have the thread do ``job``."""
        with self.changed:
            self.enqueue(job)

    def wait(self, stall_s: float) -> bool:
        """Wait until all is done; False if nothing went on for ``stall_s``, or after a minute."""
        give_up_at, seen = now() + LONGEST_WAIT_S, -1
        with self.changed:
            self._waiters += 1
            try:
                while (self._jobs or self._at_work) and self._progress != seen and now() < give_up_at:
                    seen = self._progress
                    self.changed.wait(stall_s)  # only progress ends this early
                return not (self._jobs or self._at_work)
            finally:
                self._waiters -= 1

    def wake_when_there_is_room(self, eventfd: int | None) -> None:
        """Write to ``eventfd`` when something has been written, once; None: no more."""
        with self.changed:
            self._wake_fd = eventfd

    # --- for jobs, which hold `changed` --------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        """As `do`, with the lock held."""
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="file writer", daemon=True)
            self._thread.start()
        elif not self._at_work:
            self.changed.notify_all()

    def opened(self, count: int) -> None:
        """So many files more (or fewer) share the room."""
        self._files += count

    def hold(self, count: int) -> None:
        """So many bytes more are held (or fewer: they are written)."""
        self._held += count
        if count < 0:
            self._note_progress()

    def has_room(self, held: int) -> bool:
        """Whether a file that has so many bytes held may have more."""
        return self._held < self._held_bytes and held < max(LEAST_SHARE, self._held_bytes // max(1, self._files))

    @property
    def is_overfull(self) -> bool:
        """Whether even what is written without a look at `has_room` is too much."""
        return self._held >= 2 * self._held_bytes

    def _note_progress(self) -> None:
        self._progress += 1
        if self._waiters:
            self.changed.notify_all()
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._wake_fd = None

    # --- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            with self.changed:
                self._at_work = False
                self._note_progress()

    def _next(self) -> Job | None:
        with self.changed:
            while not self._jobs:
                if not self._files:
                    self._thread = None
                    return None
                self.changed.wait()
            self._at_work = True
            return self._jobs.popleft()
