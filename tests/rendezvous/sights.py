"""What a proposer sees, built by hand, for tests of the pure decisions."""

from __future__ import annotations

from typing import Any

from dlaunch.outcome import ExceptionInfo, ExitStatus, Failure, FailureKind, TracebackFrame
from dlaunch.rendezvous.decide import Decision, Sight, decide
from dlaunch.rendezvous.placing import assign
from dlaunch.rendezvous.records import (
    AssignRecord,
    Kind,
    NodeRecord,
    Phase,
    ReportRecord,
    RoundRecord,
    RunSettings,
)

NOW = 1000.0
TWO_TO_FOUR = RunSettings(2, 4, settle_s=1.0)


def node(name: str, **changes: Any) -> NodeRecord:
    """A node; names order as arrivals do."""
    return NodeRecord(name, f"10.0.0.1:{ord(name[0])}", f"host-{name}", "boot", 2, "default")._replace(**changes)


def failure(host: str = "host-a", *, code: int = 3, lifetime_s: float = 100.0, **changes: Any) -> Failure:
    """A worker's end by an exit code."""
    status = ExitStatus(code=code)
    return Failure(FailureKind.EXIT, 0, 1, 1, host, 77, status, NOW, lifetime_s)._replace(**changes)


def raised(line: int, **changes: Any) -> Failure:
    """A worker's end by an exception."""
    exception = ExceptionInfo("ValueError", "no", (TracebackFrame("train.py", line, "main"),))
    return failure(kind=FailureKind.EXCEPTION, exception=exception, code=1, **{"lifetime_s": 1.0, **changes})


def report(kind: Kind, name: str, revision: int = 10, **changes: Any) -> ReportRecord:
    """A report of round 1."""
    return ReportRecord(1, name, kind, revision)._replace(**changes)


def ready(name: str, port: int = 29500) -> ReportRecord:
    """It can start workers, and a socket for their store is open."""
    return report(Kind.READY, name, 1, meeting_address=f"host-{name}", meeting_port=port, meeting_served=True)


def by_node(*reports: ReportRecord) -> dict[str, dict[Kind, ReportRecord]]:
    """Reports as the board keeps them."""
    found: dict[str, dict[Kind, ReportRecord]] = {}
    for one in reports:
        found.setdefault(one.node_id, {})[one.kind] = one
    return found


def members(names: str) -> dict[str, AssignRecord]:
    """The members of a round, in the order of their ranks."""
    nodes = [node(name) for name in names]
    return {record.node_id: record for record in assign(nodes, {name: ready(name) for name in names})}


def sight(
    phase: Phase, *reports: ReportRecord, nodes: str = "ab", of: str = "ab", round: int = 1, **changes: Any
) -> Sight:
    """Registered ``nodes`` (one letter each), and the members ``of`` the round where it does not form."""
    settings = changes.pop("settings", TWO_TO_FOUR)
    told = {name: changes.pop(name) for name in tuple(changes) if name in RoundRecord._fields}
    record = RoundRecord(round, phase, "the reason before", nonce="" if phase is Phase.FORMING else "n")
    return Sight(
        settings=settings,
        round=record._replace(**told),
        members={} if phase is Phase.FORMING else members(of),
        nodes={name: node(name) for name in nodes},
        reports=by_node(*reports),
        away=frozenset(),
        fenced=frozenset(),
        stop_wish=None,
        timeout_s=60.0,
        since=NOW - 10,
        arrival_at=NOW - 10,
        now=NOW,
    )._replace(**changes)


def forming(*reports: ReportRecord, **changes: Any) -> Sight:
    """A round that forms."""
    return sight(Phase.FORMING, *reports, **changes)


def running(*reports: ReportRecord, **changes: Any) -> Sight:
    """A round that runs."""
    return sight(Phase.RUNNING, *reports, **changes)


def stopping(*reports: ReportRecord, **changes: Any) -> Sight:
    """A round that stops."""
    return sight(Phase.STOPPING, *reports, **changes)


def decided(seen: Sight) -> Decision:
    """The decision, where there has to be one."""
    decision = decide(seen)
    assert isinstance(decision, Decision), decision
    return decision
