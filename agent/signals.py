"""Signals as events: the handlers do nothing, the numbers come out of a socket."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

ALWAYS_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class SignalSource:
    """While entered, the signals that end a job and those that are passed on arrive at `socket`, without other effect.

    A signal that was ignored when dlaunch started (``nohup`` and SIGHUP) stays ignored.
    """

    def __init__(self, ending: Iterable[int]) -> None:
        self._signals = sorted({int(signum) for signum in (*ending, *ALWAYS_FORWARDED)})
        self._before: dict[int, Any] = {}
        self.socket, self._writer = socket.socketpair()

    def __enter__(self) -> SignalSource:
        self.socket.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._signals:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        self.socket.close()
        self._writer.close()

    def read(self) -> list[int]:
        """The numbers of the signals that have arrived, in order."""
        try:
            return list(self.socket.recv(4096))
        except BlockingIOError:
            return []


def _note(_signum: int, _frame: FrameType | None) -> None:
    """The wake-up descriptor has already said it all."""
