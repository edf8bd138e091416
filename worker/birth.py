"""How processes come into being below a starter: what the two ways share."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol

from dlaunch.frames import Frame

from .lineage import die_with_parent
from .signals import SignalInbox

BUG = 70  # exit code of a child that met a bug of ours before it became what it was to be


class Request(NamedTuple):
    """What the agent asks for, with the descriptors that came with it."""

    frame: Frame
    fds: Sequence[int]


class NotStarted(Exception):
    """A process could not be started; the text is one sentence for the user."""


class Birth(Protocol):
    """One way to start processes. Both methods return a process id, or raise NotStarted."""

    def worker(self, request: Request, meanwhile: Callable[[], None]) -> int:
        """Start a worker. Returns 0 in a child that is to go on as the worker itself.

        Where this has to wait for something, it calls ``meanwhile`` again and again.
        """

    def store(self, request: Request) -> int:
        """Start the process that serves the workers' store."""


def fork(inbox: SignalInbox, tie: signal.Signals = signal.SIGKILL) -> int:
    """Fork a child with a session of its own and the signals of a fresh process, that gets ``tie`` when we die.

    Raises NotStarted where the system has no room for another process.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # none may meet the child half-made
    try:
        pid = fork_quietly()
        if pid == 0:
            _settle(inbox, parent, tie)
            mask = set()
    except OSError as error:
        raise NotStarted(f"a process could not be created: {error.strerror}.") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def give_up(error: BaseException) -> NoReturn:
    """End a child at once: whatever it is, it must not go on as a second starter."""
    sys.__excepthook__(type(error), error, error.__traceback__)
    os._exit(BUG)


def fork_quietly() -> int:
    """``os.fork``, without what Python 3.12 says of threads: OpenBLAS's are known to be safe to fork over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _settle(inbox: SignalInbox, parent: int, tie: signal.Signals) -> None:
    try:
        inbox.restore()
        os.setsid()
        die_with_parent(tie, parent)
    except BaseException as error:
        give_up(error)
