"""Ending what workers leave behind, in stages: who gets which signal when, decided from values."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import NamedTuple

from dlaunch.clock import now

from . import family
from .family import Relative
from .signals import SignalInbox

NATURAL_END_S = 1.0  # a gentle sweep lets things end by themselves for so long
TIDY_S = 5.0  # what cleans up after others gets at most so long once the others are dead
LOOK_AGAIN_S = 0.02  # a process that was born while we looked is found at the next look


class Stage(Enum):
    """How far a sweep has gone with those that do not clean up after others."""

    WAIT = "wait"
    ASK = "ask"
    KILL = "kill"


class Signal(NamedTuple):
    """A signal to send."""

    pid: int
    number: int


class Sweep:
    """One sweep: `step` is to be called again and again until no child is left.

    What is in ``last`` is killed when nothing else is alive: the starter, which would go on with the work if the guard,
    whose sweep this is, was killed in the middle of it.
    """

    def __init__(
        self, gentle_s: float, started_at: float, ours: Collection[int] = (), last: Collection[int] = ()
    ) -> None:
        self.killed: dict[int, str] = {}  # names by process id, without those that are `ours`
        self._ours = frozenset(ours)
        self._last = frozenset(last)
        self._stage = Stage.WAIT if gentle_s > 0 else Stage.KILL
        self._ask_at = started_at + NATURAL_END_S
        self._kill_at = self._ask_at + gentle_s
        self._tidy_until: float | None = None

    def hurry(self) -> None:
        """Give no more time to anything but the tidying."""
        self._stage = Stage.KILL

    def step(self, at: float, alive: Sequence[Relative], tidiers: Collection[int]) -> list[Signal]:
        """Whom to signal now; ``alive`` is all that runs below us, ``tidiers`` those that clean up after others."""
        self._advance(at)
        rest = [relative for relative in alive if relative.pid not in self._last]
        others = [relative for relative in rest if relative.pid not in tidiers]
        if others:
            return self._end_others(others)
        if not rest:
            return self._signal(alive, signal.SIGKILL)
        if self._tidy_until is None:
            self._tidy_until = at + TIDY_S
        return self._signal(rest, signal.SIGKILL) if at >= self._tidy_until else []

    def _advance(self, at: float) -> None:
        if self._stage is Stage.WAIT and at >= self._ask_at:
            self._stage = Stage.ASK
        if self._stage is Stage.ASK and at >= self._kill_at:
            self._stage = Stage.KILL

    def _end_others(self, others: Sequence[Relative]) -> list[Signal]:
        match self._stage:
            case Stage.WAIT:
                return []
            case Stage.ASK:
                return self._signal(
                    [relative for relative in others if relative.pid not in self.killed], signal.SIGTERM
                )
            case Stage.KILL:
                return self._signal(others, signal.SIGKILL)

    def _signal(self, relatives: Sequence[Relative], signum: signal.Signals) -> list[Signal]:
        self.killed.update((relative.pid, relative.name) for relative in relatives if relative.pid not in self._ours)
        return [Signal(relative.pid, signum) for relative in relatives]


def take_step(sweep: Sweep) -> float:
    """Look at what runs below this process, and do what the sweep says; seconds until the next look is due."""
    alive = family.alive_below(os.getpid())
    tidiers = {relative.pid for relative in alive if family.is_tidier(relative.pid)}
    for target in sweep.step(now(), alive, tidiers):
        family.send(target.pid, target.number)
    return LOOK_AGAIN_S


def ask_to_end(inbox: SignalInbox, child: Callable[[], int], reap: Callable[[], None], patience_s: float) -> None:
    """SIGTERM a child; returns when it is reaped, or the patience is over. ``child``: its pid, 0 once it is reaped."""
    give_up_at = now() + patience_s
    if pid := child():
        family.send(pid, signal.SIGTERM)
    while child() and (left := give_up_at - now()) > 0:
        inbox.wait(left)
        reap()


def end_everything_below(inbox: SignalInbox, reap: Callable[[], None], last: Collection[int] = ()) -> None:
    """SIGKILL all that runs below this process, and return when nothing is left, however long that takes."""
    sweep = Sweep(gentle_s=0.0, started_at=now(), last=last)
    reap()
    while family.has_children():
        inbox.wait(take_step(sweep))
        reap()
