"""What is to be decided of a round, if anything: one pure function of what stands in the store, and of proofs.

Any agent may commit what it says by one compare-and-swap on `round`; there is no leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlaunch.errors import ExitCode
from dlaunch.outcome import Failure, FailureKind, RunState, describe
from dlaunch.restarts import ALIKE, SAME_MISTAKE, are_one_mistake, backoff, budget_spent, mark_of

from .placing import assign, in_rank_order
from .records import (
    MOST_ELDERS,
    MOST_PASSED,
    AssignRecord,
    Join,
    Kind,
    NodeRecord,
    Phase,
    ReportRecord,
    RoundRecord,
    RunSettings,
)
from .values import Ending

FOLD_S = 0.02  # what happens so close together is one cause
JOIN_FOLD_S = 0.2  # nodes that come so close together are taken in at once
PATIENCE_S = 5.0  # how long a forming round waits for nodes that should be coming
MOST_DROPPED = 100  # by one transaction, which has its limit; the others' leases run out

Reports = Mapping[str, Mapping[Kind, ReportRecord]]  # by node id


class Sight(NamedTuple):
    """What one agent sees: lists of the store, what it knows itself, and its own clock."""

    settings: RunSettings
    round: RoundRecord
    members: Mapping[str, AssignRecord]  # of the round; empty while it forms
    nodes: Mapping[str, NodeRecord]  # registered
    reports: Reports  # of this round
    away: frozenset[str]  # hosts that were set aside
    fenced: frozenset[str]  # members whose lapsed leases are proofs to this agent
    stop_wish: str | None  # a user's wish that the run ends
    timeout_s: float  # how long a round may form
    since: float  # when this agent first saw the round in this phase
    arrival_at: float  # when this agent last saw a node arrive, or get ready
    now: float


class Decision(NamedTuple):
    """What `round` should become; the assignments have to be written before."""

    record: RoundRecord
    assigns: tuple[AssignRecord, ...] = ()
    set_aside: str = ""  # a host
    dropped: tuple[str, ...] = ()  # nodes whose agents are gone, though their leases have not run out yet


class LookAgain(NamedTuple):
    """Nothing to be decided before this time, if nothing happens."""

    at: float


def decide(sight: Sight) -> Decision | LookAgain | None:
    """What to commit now, when to look again, or None: nothing until something happens."""
    match sight.round.phase:
        case Phase.FORMING:
            return _while_forming(sight)
        case Phase.RUNNING:
            return _while_running(sight)
        case Phase.STOPPING:
            return _while_stopping(sight)
        case Phase.CLOSED:
            return None


# --- forming ---------------------------------------------------------------------------------------------------------


def _while_forming(sight: Sight) -> Decision | LookAgain | None:
    if sight.stop_wish is not None:
        return _close_interrupted(sight)
    settings, now = sight.settings, sight.now
    candidates = [node for node in sight.nodes.values() if not _is_leaving(sight, node.node_id)]
    present = [node for node in candidates if node.host not in sight.away]
    if len(present) < settings.min_nodes:
        present = candidates  # set aside or not: without them there is no job
    ready = [node for node in present if Kind.READY in sight.reports.get(node.node_id, {})]
    if len(ready) < settings.min_nodes:
        return _too_few(sight, candidates)
    go_at = _go_at(sight, present, ready)
    if now < go_at:
        return LookAgain(go_at)
    oldest = sorted(ready, key=lambda node: node.node_id)[: settings.max_nodes]
    reports = {node.node_id: sight.reports[node.node_id][Kind.READY] for node in oldest}
    record = sight.round._replace(
        phase=Phase.RUNNING,
        reason=f"{len(oldest)} {'node is' if len(oldest) == 1 else 'nodes are'} ready",
        elders=tuple(node.node_id for node in oldest[:MOST_ELDERS]),
        passed=tuple(sorted(node.node_id for node in present if node not in ready))[:MOST_PASSED],
        expected=0,
        delay_s=0.0,
        restart_ages_s=_aged(sight),
    )
    return Decision(record, assign(in_rank_order(oldest), reports))


def _go_at(sight: Sight, present: list[NodeRecord], ready: list[NodeRecord]) -> float:
    """When a round with enough nodes may run: all that can be expected are in, or have been waited for."""
    settings = sight.settings
    not_before = sight.since + sight.round.delay_s
    if len(ready) >= settings.max_nodes:
        return not_before
    if sight.round.number == 1:
        return max(not_before, sight.arrival_at + settings.settle_s)
    coming = max(len(present), min(sight.round.expected, settings.max_nodes))
    if len(ready) >= coming:
        return not_before
    return max(not_before, sight.since + PATIENCE_S)


def _too_few(sight: Sight, candidates: list[NodeRecord]) -> Decision | LookAgain:
    give_up_at = sight.since + sight.timeout_s
    if sight.now < give_up_at:
        return LookAgain(give_up_at)
    hosts = ", ".join(sorted(node.host for node in candidates)[:10]) or "none"
    reason = (
        f"{len(candidates)} of at least {sight.settings.min_nodes} nodes came within {sight.timeout_s:g} s ({hosts})"
    )
    return _close(sight, RunState.FAILED, ExitCode.TEMPORARY, reason, None)


# --- running ---------------------------------------------------------------------------------------------------------


def _while_running(sight: Sight) -> Decision | LookAgain | None:
    if all(Kind.FINISHED in sight.reports.get(member, {}) for member in sight.members) and sight.members:
        return _close(sight, RunState.SUCCEEDED, ExitCode.OK, "all workers succeeded", None)
    if sight.stop_wish is not None:
        return _stopping(sight, sight.stop_wish)
    if trouble := _trouble(sight):
        return _stopping(sight, *trouble)
    return _grow(sight)


def _trouble(sight: Sight) -> tuple[str, str] | None:
    """Why a round that runs has to stop, and the node whose failure it is (empty: nobody's); None: it has not."""
    events = [
        report
        for member in sight.members
        if Kind.FINISHED not in sight.reports.get(member, {})  # what becomes of its agent then changes nothing
        for kind, report in sight.reports.get(member, {}).items()
        if kind is not Kind.READY
    ]
    if events:
        first = min(events, key=lambda report: report.revision)
        return _in_words(sight, first), first.node_id if first.kind is Kind.FAILED else ""
    if lapsed := sorted(member for member in sight.fenced if member in sight.members and not _ended(sight, member)):
        return f"node {sight.members[lapsed[0]].host} was lost: it renewed its lease no more", ""
    return None


def _in_words(sight: Sight, report: ReportRecord) -> str:
    host = sight.members[report.node_id].host
    match report.kind:
        case Kind.FAILED:
            rank = report.failure.rank if report.failure else None
            return f"rank {rank} on {host} failed" if rank is not None else f"node {host} failed"
        case Kind.LEAVING:
            return f"node {host} leaves: {report.reason}"
        case Kind.STOPPED:
            return f"node {host} had to stop its workers"
        case _:
            return f"node {host} was lost: its agent is gone"


def _grow(sight: Sight) -> Decision | LookAgain | None:
    settings = sight.settings
    if settings.join is Join.AT_RESTART or len(sight.members) >= settings.max_nodes:
        return None
    outside = [
        node
        for node in sight.nodes.values()
        if node.node_id not in sight.members and node.host not in sight.away and not _is_leaving(sight, node.node_id)
    ]
    # one that did not get ready in time may be dead or hang: it comes in once it is, or when the job restarts
    hosts = [node.host for node in outside if node.node_id not in sight.round.passed or _is_ready(sight, node.node_id)]
    if not hosts or any(Kind.FINISHED in sight.reports.get(member, {}) for member in sight.members):
        return None  # a job that is ending is not restarted to grow
    settle_s = settings.join_settle_s if settings.join is Join.SETTLE else JOIN_FOLD_S
    if sight.now < (at := sight.arrival_at + settle_s):
        return LookAgain(at)
    return _stopping(sight, f"node {', '.join(sorted(hosts)[:3])} joins")


def _stopping(sight: Sight, reason: str, culprit: str = "") -> Decision:
    record = sight.round._replace(phase=Phase.STOPPING, reason=reason, culprit=culprit, restart_ages_s=_aged(sight))
    return Decision(record)


# --- stopping --------------------------------------------------------------------------------------------------------


def _while_stopping(sight: Sight) -> Decision | LookAgain | None:
    if not all(_ended(sight, member) or member in sight.fenced for member in sight.members):
        return None
    if sight.stop_wish is not None:
        return _close_interrupted(sight)
    lost = [record.host for member, record in sight.members.items() if not _said_so_itself(sight, member)]
    if lost:
        told = any(sight.round.reason.startswith(f"node {host} was lost") for host in lost)
        return _form(sight, sight.round.reason if told else f"node {', '.join(sorted(set(lost))[:3])} was lost")
    failure = _root_cause(sight)
    if failure is None:
        return _form(sight, sight.round.reason)
    return _after_failure(sight, failure)


def _root_cause(sight: Sight) -> Failure | None:
    """The failure with the smallest revision, unless a node was lost or left before: then it is a victim of that.

    Where a node was lost for good, failures elsewhere are its victims, whichever was reported first.
    """
    first: ReportRecord | None = None
    for member in sight.members:
        for kind, report in sight.reports.get(member, {}).items():
            if kind in {Kind.FAILED, Kind.LEAVING, Kind.LOST} and (first is None or report.revision < first.revision):
                first = report
    if first is None or first.kind is not Kind.FAILED:
        return None
    details = sight.reports[first.node_id].get(Kind.STOPPED)
    return (details.failure if details else None) or first.failure or _unknown_failure(sight, first)


def _unknown_failure(sight: Sight, report: ReportRecord) -> Failure:
    kind, host = FailureKind.INFRASTRUCTURE, sight.members[report.node_id].host
    return Failure(kind, 0, None, None, host, None, None, 0.0, 0.0, detail="a failure without details")


def _after_failure(sight: Sight, failure: Failure) -> Decision:
    settings, record = sight.settings, sight.round
    marks = (*record.marks, mark_of(failure))[-ALIKE:]
    same_host = failure.node == record.streak_host
    told = record._replace(
        marks=marks, streak_host=failure.node, streak=record.streak + 1 if same_host else 1, restart_ages_s=_aged(sight)
    )
    sight = sight._replace(round=told)
    if settings.early_stop and are_one_mistake(marks):
        return _close(sight, RunState.FAILED, failure.exit_code, SAME_MISTAKE, failure)
    window = settings.restart_window_s
    counted = told.restarts if window is None else sum(1 for age in told.restart_ages_s if age < window)
    if counted >= settings.max_restarts:
        return _close(sight, RunState.FAILED, failure.exit_code, budget_spent(settings.max_restarts, window), failure)
    delay_s = backoff(settings.backoff_s, settings.backoff_max_s, counted)
    formed = _form(sight, _restart_sentence(settings, failure, told.restarts + 1, delay_s))
    ages = (*formed.record.restart_ages_s, 0.0) if window is not None else ()
    record = formed.record._replace(restarts=told.restarts + 1, delay_s=delay_s, restart_ages_s=ages)
    if _is_to_be_set_aside(sight, failure.node):
        gone = sum(1 for member in sight.members.values() if member.host == failure.node)
        record = record._replace(streak=0, streak_host="", expected=max(0, record.expected - gone))
        return formed._replace(record=record, set_aside=failure.node)
    return formed._replace(record=record)


def _restart_sentence(settings: RunSettings, failure: Failure, number: int, delay_s: float) -> str:
    when = f" in {delay_s:g} s" if delay_s > 0 else ""
    budget = f"{number} of {settings.max_restarts}" if settings.restart_window_s is None else f"number {number}"
    return f"{describe(failure)} on {failure.node}; restarting all workers{when} (restart {budget})"


def _is_to_be_set_aside(sight: Sight, host: str) -> bool:
    most = sight.settings.max_node_failures
    if most is None or sight.round.streak < most:
        return False
    others = [node for node in sight.nodes.values() if node.host != host and node.host not in sight.away]
    return len(others) >= sight.settings.min_nodes


# --- what follows a round --------------------------------------------------------------------------------------------


def _form(sight: Sight, reason: str) -> Decision:
    staying = sum(1 for m in sight.members if _said_so_itself(sight, m) and not _is_leaving(sight, m))
    record = sight.round._replace(
        number=sight.round.number + 1,
        phase=Phase.FORMING,
        reason=reason,
        nonce="",
        culprit="",
        elders=(),
        passed=(),
        expected=staying,
        delay_s=0.0,
        restart_ages_s=_aged(sight),
    )
    dropped = tuple(member for member in sight.members if Kind.FENCED in sight.reports.get(member, {}))
    return Decision(record, dropped=dropped[:MOST_DROPPED])


def _close_interrupted(sight: Sight) -> Decision:
    return _close(sight, RunState.INTERRUPTED, ExitCode.TERMINATED, sight.stop_wish or "stopped", None)


def _close(sight: Sight, state: RunState, code: int, reason: str, failure: Failure | None) -> Decision:
    ending = Ending(state, int(code), reason, sight.round.restarts, failure)
    return Decision(sight.round._replace(phase=Phase.CLOSED, reason=reason, ending=ending))


def _aged(sight: Sight) -> tuple[float, ...]:
    """The restarts' ages as they are now; those older than the window are forgotten."""
    window, older = sight.settings.restart_window_s, max(0.0, sight.now - sight.since)
    return tuple(age + older for age in sight.round.restart_ages_s if window is not None and age + older < window)


def _said_so_itself(sight: Sight, member: str) -> bool:
    reports = sight.reports.get(member, {})
    return Kind.STOPPED in reports or Kind.FINISHED in reports


def _ended(sight: Sight, member: str) -> bool:
    return _said_so_itself(sight, member) or Kind.FENCED in sight.reports.get(member, {})


def _is_ready(sight: Sight, node_id: str) -> bool:
    return Kind.READY in sight.reports.get(node_id, {})


def _is_leaving(sight: Sight, node_id: str) -> bool:
    return Kind.LEAVING in sight.reports.get(node_id, {})
