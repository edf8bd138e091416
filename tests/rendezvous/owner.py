"""The owner of a store in a test: callbacks queue up, and run on its thread when it waits for something."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from dlaunch.rendezvous.store import (
    Answer,
    Change,
    Changes,
    Compare,
    GrantLease,
    LeaseGranted,
    Operation,
    Put,
    Range,
    RangeAnswer,
    Request,
    Store,
    StoreError,
    Target,
    Txn,
    TxnAnswer,
    Watch,
    WatchLost,
)

PATIENCE_S = 20.0  # for what should happen at once, on a loaded machine

T = TypeVar("T")


class Heard:
    """What a watch has told."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.news: list[Changes | WatchLost] = []
        self.watch: Watch | None = None

    @property
    def changes(self) -> list[Change]:
        return [change for news in self.news if isinstance(news, Changes) for change in news.changes]

    @property
    def lost(self) -> WatchLost | None:
        return next((news for news in self.news if isinstance(news, WatchLost)), None)

    def until(self, count: int, patience_s: float = PATIENCE_S) -> list[Change]:
        """The changes, once there are so many."""
        self._owner.until(lambda: len(self.changes) >= count or self.lost is not None, patience_s)
        return self.changes


class Owner:
    """Runs a store's callbacks."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def deliver(self, call: Callable[[], None]) -> None:
        self.posted.put(call)

    def until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Run callbacks until a condition holds."""
        deadline = time.monotonic() + patience_s
        while not holds():
            left = deadline - time.monotonic()
            assert left > 0, f"it did not happen within {patience_s} s"
            try:
                self.posted.get(timeout=left)()
            except queue.Empty:
                continue

    def ask(self, store: Store, request: Request, timeout_s: float = 10.0) -> Answer | StoreError:
        answers: list[Answer | StoreError] = []
        store.request(request, timeout_s, answers.append)
        self.until(lambda: bool(answers), timeout_s + PATIENCE_S)
        return answers[0]

    def timed(self, store: Store, request: Request, timeout_s: float = 10.0) -> tuple[Answer | StoreError, float]:
        """An answer, and how long it took."""
        began = time.monotonic()
        return self.ask(store, request, timeout_s), time.monotonic() - began

    def txn(self, store: Store, *operations: Operation, when: tuple[Compare, ...] = ()) -> TxnAnswer:
        return sure(TxnAnswer, self.ask(store, Txn(when, operations)))

    def put(self, store: Store, key: str, value: bytes = b"", lease: int = 0) -> int:
        """Write a key; returns the revision."""
        return self.txn(store, Put(key, value, lease)).revision

    def range(self, store: Store, wanted: Range) -> RangeAnswer:
        return sure(RangeAnswer, self.ask(store, wanted))

    def lease(self, store: Store, ttl_s: int) -> int:
        return sure(LeaseGranted, self.ask(store, GrantLease(ttl_s))).lease

    def watch(self, store: Store, key: str, from_revision: int, *, prefix: bool = True) -> Heard:
        heard = Heard(self)
        heard.watch = store.watch(key, prefix=prefix, from_revision=from_revision, heard=heard.news.append)
        return heard


def sure(kind: type[T], answer: object) -> T:
    assert isinstance(answer, kind), answer
    return answer


def absent(key: str) -> Compare:
    return Compare(key, Target.CREATE_REVISION, 0)
