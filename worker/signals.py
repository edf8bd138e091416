"""How the guard and the starters hear signals: as numbers to be read, never as interruptions."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable

# Aimed at the job by whoever sends them (``pkill -USR1 -f train.py``): the workers get them, their parents go on.
AIMED_AT_THE_JOB = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
HEARD = (signal.SIGCHLD, signal.SIGTERM)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class SignalInbox:
    """Signals that arrive, to be waited for together with a socket; and the way back to how it was before."""

    def __init__(self) -> None:
        self._before = {signum: signal.getsignal(signum) for signum in (*AIMED_AT_THE_JOB, *HEARD)}
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_before = -1
        self._poll = select.poll()
        self._poll.register(self._read_end, select.POLLIN)

    def deafen(self) -> None:
        """Ignore what is aimed at the job."""
        self._set(AIMED_AT_THE_JOB, signal.SIG_IGN)

    def listen(self) -> None:
        """From now on SIGCHLD and SIGTERM are only noted, whatever mask and dispositions were inherited."""
        self.deafen()
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for signum in HEARD:
            signal.signal(signum, _noted_by_the_wakeup_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def watch(self, fd: int) -> None:
        """Let `wait` return for this descriptor too."""
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """The end of `watch`."""
        self._poll.unregister(fd)

    def wait(self, timeout_s: float | None) -> tuple[frozenset[int], frozenset[int]]:
        """Block until something happens; the descriptors that can be read and the signals that have arrived."""
        ready = self._poll.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        readable = frozenset(fd for fd, _event in ready)
        return readable - {self._read_end}, self._arrived() if self._read_end in readable else frozenset()

    def restore(self) -> None:
        """In a forked child: everything as it was before; the mask is left to the caller."""
        signal.set_wakeup_fd(self._wakeup_before)
        for signum, before in self._before.items():
            if before is not None:  # None: set by C code, and never touched
                signal.signal(signum, before)
        os.close(self._read_end)
        os.close(self._write_end)

    def _arrived(self) -> frozenset[int]:
        try:
            return frozenset(os.read(self._read_end, 4096))
        except BlockingIOError:
            return frozenset()

    def _set(self, signals: Iterable[signal.Signals], disposition: signal.Handlers) -> None:
        for signum in signals:
            if self._before.get(signum, signal.SIG_DFL) is not None:
                signal.signal(signum, disposition)


def unignore_for_exec() -> None:
    """Undo what Python itself ignores: a program that takes this process's place should start with the defaults."""
    for signum in _IGNORED_BY_PYTHON:
        signal.signal(signum, signal.SIG_DFL)


def _noted_by_the_wakeup_fd(_signum: int, _frame: object) -> None:
    """Do nothing: the number is in the wake-up descriptor already."""
