"""Reports on their way into the store: one after the other, each created once, and only while its round lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dlaunch.outcome import Failure

from .desk import TIMEOUT_S, Desk
from .keys import Keys
from .records import ReportRecord, write_report
from .store import Answer, Compare, KeyValue, Put, Range, StoreError, Target, Trouble, Txn, TxnAnswer


class RoundSeen(NamedTuple):
    """The number of the round in the store, and the revision at which it stood."""

    number: int
    revision: int


class Outbox:
    """Writes reports in the order in which they were made, until each is known to be there or to have come too late."""

    def __init__(
        self,
        desk: Desk,
        keys: Keys,
        seen: Callable[[], RoundSeen],
        see: Callable[[KeyValue | None], None],
        trouble: Callable[[StoreError], None],
    ) -> None:
        """``seen`` tells of `round`, ``see`` gets it as it is found on the way; ``trouble``: a write failed."""
        self._desk = desk
        self._keys = keys
        self._seen = seen
        self._see = see
        self._trouble = trouble
        self._waiting: list[ReportRecord] = []
        self._known: set[str] = set()
        self._in_flight = False
        self._lease = 0
        self.when_empty: Callable[[], None] | None = None

    def open(self, lease: int) -> None:
        """Reports stand on the lease of the run, not on their node's: they must outlive it."""
        self._lease = lease
        self.send()

    def post(self, report: ReportRecord) -> None:
        """Write a report, unless it was posted before."""
        key = self._keys.report(report.number, report.node_id, report.kind.value)
        if key not in self._known:
            self._known.add(key)
            self._waiting.append(report)
            self.send()

    @property
    def is_empty(self) -> bool:
        """Whether all that was posted is written, or too late."""
        return not self._waiting

    def send(self) -> None:
        """Send the oldest report, if none is on its way."""
        seen = self._seen()
        self._waiting = [report for report in self._waiting if report.number >= seen.number]
        if not self._waiting:
            if self.when_empty:
                self.when_empty()
            return
        report = self._waiting[0]
        if self._in_flight or not self._lease or report.number != seen.number:
            return
        self._in_flight = True
        key = self._keys.report(report.number, report.node_id, report.kind.value)
        request = Txn(
            compares=(
                Compare(self._keys.round, Target.MOD_REVISION, seen.revision),
                Compare(key, Target.CREATE_REVISION, 0),
            ),
            success=(Put(key, write_report(report), self._lease),),
            failure=(Range(self._keys.round), Range(key, keys_only=True)),
        )
        self._desk.ask(request, TIMEOUT_S, lambda answer: self._sent(report, answer))

    def _sent(self, report: ReportRecord, answer: Answer | StoreError) -> None:
        self._in_flight = False
        if isinstance(answer, StoreError):
            self._trouble(answer)
            if answer.trouble is Trouble.TOO_LARGE and report.failure and report in self._waiting:
                self._waiting[self._waiting.index(report)] = report._replace(failure=_bare(report.failure))
        if not isinstance(answer, TxnAnswer):
            self._desk.retry("reports", self.send)
            return
        if not answer.succeeded:
            there, written = answer.ranges
            before = self._seen()
            self._see(there.kvs[0] if there.kvs else None)
            if not written.kvs and self._seen() != before:
                self.send()  # the round had moved, or is another one now
                return
            if not written.kvs:  # it cannot be read, or is not there
                self._desk.retry("reports", self.send)
                return
        if report in self._waiting:
            self._waiting.remove(report)
        self.send()


def _bare(failure: Failure) -> Failure:
    """A failure without what makes it large."""
    exception = failure.exception and failure.exception._replace(message="", frames=(), traceback="")
    return failure._replace(exception=exception, last_output=(), detail="")
