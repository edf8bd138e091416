"""Where the parts of a member put what they ask for, and where its answers find back to who asked. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from .effects import Ask, CancelTimer, Effect, SetTimer, Unwatch, WatchKeys
from .events import Answered, TimerFired, WatchHeard
from .store import Answer, Changes, RangeAnswer, Request, StoreError, TxnAnswer, WatchLost

TIMEOUT_S = 2.0  # of one request, where nothing says otherwise
RETRY_S = 0.2
LONGEST_PAUSE_S = 2.0

Then = Callable[["Answer | StoreError"], None]
Heard = Callable[["Changes | WatchLost"], None]


class Desk:
    """Effects on their way out, and the continuations of those that are answered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.effects: list[Effect] = []
        self.answered_at: float | None = None  # when the store last answered anything
        self.went_back: tuple[int, int] | None = None  # revisions: what was seen, and what came after it
        self._ids = count(1)
        self._asks: dict[int, tuple[Then, int]] = {}  # and the newest revision that was known when it was sent
        self._watches: dict[int, Heard] = {}
        self._timers: dict[str, Callable[[], None]] = {}
        self._revision = 0
        self._tries: dict[str, int] = {}

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; once."""
        effects, self.effects = self.effects, []
        return effects

    def emit(self, effect: Effect) -> None:
        """Something to be done that nobody here waits for."""
        self.effects.append(effect)

    def ask(self, request: Request, timeout_s: float, then: Then) -> None:
        """A request to the store; ``then`` gets its answer or its failure."""
        number = next(self._ids)
        self._asks[number] = (then, self._revision)
        self.emit(Ask(number, request, timeout_s))

    def watch(self, key: str, *, prefix: bool, from_revision: int, heard: Heard) -> int:
        """A watch; ``heard`` gets what it hears until it is lost."""
        number = next(self._ids)
        self._watches[number] = heard
        self.emit(WatchKeys(number, key, prefix, from_revision))
        return number

    def unwatch(self, number: int | None) -> None:
        """End a watch that may have ended already."""
        if number in self._watches:
            del self._watches[number]
            self.emit(Unwatch(number))

    def set_timer(self, name: str, at: float, then: Callable[[], None]) -> None:
        """Call ``then`` at a time; one timer of a name runs."""
        self._timers[name] = then
        self.emit(SetTimer(name, at))

    def cancel_timer(self, name: str) -> None:
        """Forget a timer that may have run out already."""
        if name in self._timers:
            del self._timers[name]
            self.emit(CancelTimer(name))

    def answered(self, event: Answered) -> None:
        """Hand an answer to who asked."""
        then, known = self._asks.pop(event.id, (None, 0))
        if then is None:
            return
        if not isinstance(event.answer, StoreError):
            self.answered_at = self.now
            self._tries.clear()
        if isinstance(event.answer, RangeAnswer | TxnAnswer):  # the others tell where one server stands
            if event.answer.revision < known:  # a linearizable store never shows less than it has shown
                self.went_back = (known, event.answer.revision)
                return
            self._revision = max(self._revision, event.answer.revision)
        then(event.answer)

    def heard(self, event: WatchHeard) -> None:
        """Hand what a watch heard to who watches."""
        heard = self._watches.get(event.id)
        if heard is None:
            return
        if isinstance(event.what, WatchLost):
            del self._watches[event.id]
        else:
            self._revision = max(self._revision, event.what.revision)
        heard(event.what)

    def retry(self, name: str, then: Callable[[], None]) -> None:
        """Call ``then`` after a pause that grows until the store answers again: it may be starved as it is."""
        tries = self._tries.get(name, 0)
        self._tries[name] = tries + 1
        self.set_timer(name, self.now + min(RETRY_S * 2**tries, LONGEST_PAUSE_S), then)

    def fired(self, event: TimerFired) -> None:
        """A timer has run out."""
        if then := self._timers.pop(event.name, None):
            then()

    def stop(self) -> None:
        """Whatever is still under way concerns nobody any more."""
        for number in list(self._watches):
            self.unwatch(number)
        for name in list(self._timers):
            self.cancel_timer(name)
        self._asks.clear()
