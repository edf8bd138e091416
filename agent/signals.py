"""Signals as events: the handlers do nothing, the numbers come out of a socket."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

ALWAYS_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class SignalSource:
    """Once it listens, the signals that end a job and those that are passed on arrive at `socket`, and do nothing else.

    A signal that was ignored when dlaunch started (``nohup`` and SIGHUP) stays ignored.
    """

    def __init__(self, ending: Iterable[int]) -> None:
        self._signals = sorted({int(signum) for signum in (*ending, *ALWAYS_FORWARDED)})
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self.socket, self._writer = socket.socketpair()
        self.socket.setblocking(False)
        self._writer.setblocking(False)

    def listen(self) -> None:
        """From now on signals are read here."""
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._signals:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _note)

    def read(self) -> list[int]:
        """The numbers of the signals that have arrived, in order."""
        try:
            return list(self.socket.recv(4096))
        except BlockingIOError:
            return []

    def call(self, callback: Callable[[], None]) -> None:
        """From now on each signal calls ``callback`` instead."""
        for signum in self._before:
            signal.signal(signum, lambda *_: callback())

    def ignore(self) -> None:
        """From now on signals do nothing: the outcome is told, and the process's last moments must not change it."""
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        """Everything as it was before `listen`."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)


def _note(_signum: int, _frame: FrameType | None) -> None:
    """The wake-up descriptor has already said it all."""
