"""`decide` as a table: what one agent sees, and what it would make of the round."""

from __future__ import annotations

from typing import Any

import pytest

from dlaunch.errors import ExitCode
from dlaunch.outcome import FailureKind, RunState
from dlaunch.rendezvous.decide import (
    JOIN_FOLD_S,
    MOST_DROPPED,
    PATIENCE_S,
    Decision,
    LookAgain,
    Sight,
    decide,
)
from dlaunch.rendezvous.records import Join, Kind, Phase, RunSettings
from dlaunch.restarts import ALIKE, EARLY_S, mark_of

from .sights import (
    NOW,
    TWO_TO_FOUR,
    decided,
    failure,
    forming,
    node,
    raised,
    ready,
    report,
    running,
    sight,
    stopping,
)

FAILED, LEAVING, LOST = Kind.FAILED, Kind.LEAVING, Kind.LOST
STOPPED, FENCED, FINISHED = Kind.STOPPED, Kind.FENCED, Kind.FINISHED
ALL_STOPPED = (report(STOPPED, "a", 20), report(STOPPED, "b", 21))
ONE_RESTART = TWO_TO_FOUR._replace(max_restarts=1)


def becomes(seen: Sight) -> tuple[int, Phase, str]:
    record = decided(seen).record
    return record.number, record.phase, record.reason


# --- forming ---------------------------------------------------------------------------------------------------------

FORMS: list[tuple[str, Sight, str | float]] = [  # the group, or when to look again
    ("too few are ready", forming(ready("a")), NOW - 10 + 60),
    ("the minimum is ready, and nobody came for the settle time", forming(ready("a"), ready("b")), "ab"),
    (
        "somebody came a moment ago",
        forming(ready("a"), ready("b"), arrival_at=NOW - 0.5),
        NOW + 0.5,
    ),
    (
        "the maximum needs no settle time",
        forming(*map(ready, "abcd"), nodes="abcd", arrival_at=NOW),
        "abcd",
    ),
    ("one too many is a spare", forming(*map(ready, "abcde"), nodes="abcde"), "abcd"),
    ("the youngest is the spare", forming(*map(ready, "ebcda"), nodes="ebcda"), "abcd"),
    ("the first round waits for nobody who is not ready", forming(ready("a"), ready("b"), nodes="abc"), "ab"),
    (
        "a later round waits for who is registered",
        forming(ready("a"), ready("b"), nodes="abc", round=2, since=NOW - 1),
        NOW - 1 + PATIENCE_S,
    ),
    (
        "and for who is known to come",
        forming(ready("a"), ready("b"), round=2, expected=3, since=NOW - 1),
        NOW - 1 + PATIENCE_S,
    ),
    ("but not for ever", forming(ready("a"), ready("b"), nodes="abc", round=2, since=NOW - PATIENCE_S), "ab"),
    ("nor for more than the maximum", forming(*map(ready, "abcd"), nodes="abcd", round=2, expected=9), "abcd"),
    ("all who are expected are in", forming(ready("a"), ready("b"), round=2, expected=2, since=NOW), "ab"),
    (
        "a backoff holds it",
        forming(*map(ready, "abcd"), nodes="abcd", round=2, delay_s=7.0, since=NOW - 1),
        NOW + 6,
    ),
    ("whoever leaves is not taken in", forming(*map(ready, "abc"), report(LEAVING, "b"), nodes="abc"), "ac"),
    ("nor is a host that was set aside", forming(*map(ready, "abc"), nodes="abc", away=frozenset({"host-b"})), "ac"),
    ("unless there is no job without it", forming(*map(ready, "ab"), away=frozenset({"host-b"})), "ab"),
    ("a report of nobody counts for nothing", forming(ready("a"), ready("z")), NOW - 10 + 60),
]


@pytest.mark.parametrize(("seen", "expected"), [case[1:] for case in FORMS], ids=[case[0] for case in FORMS])
def test_a_round_that_forms(seen: Sight, expected: str | float) -> None:
    decision = decide(seen)
    if isinstance(expected, float):
        assert decision == LookAgain(expected)
        return
    assert isinstance(decision, Decision)
    assert decision.record.phase is Phase.RUNNING
    assert decision.record.number == seen.round.number
    assert "".join(record.node_id for record in decision.assigns) == expected
    assert decision.record.elders == tuple(expected)


def test_a_round_names_its_eight_oldest_members() -> None:
    names = "abcdefghij"
    seen = forming(*map(ready, names), nodes=names, settings=RunSettings(10, 10))
    assert decided(seen).record.elders == tuple("abcdefgh")


def test_the_restarts_and_their_history_outlive_a_round() -> None:
    seen = forming(ready("a"), ready("b"), restarts=3, marks=("x",), streak=2, streak_host="host-a", delay_s=1.0)
    record = decided(seen).record
    assert (record.restarts, record.marks, record.streak, record.streak_host) == (3, ("x",), 2, "host-a")
    assert (record.delay_s, record.expected) == (0.0, 0)


def test_too_few_nodes_end_the_run_with_who_came() -> None:
    record = decided(forming(ready("a"), nodes="a", since=NOW - 60)).record
    assert record.ending
    assert (record.ending.state, record.ending.exit_code) == (RunState.FAILED, ExitCode.TEMPORARY)
    assert record.ending.reason == "1 of at least 2 nodes came within 60 s (host-a)"


def test_a_wish_to_stop_ends_a_run_that_forms() -> None:
    ending = decided(forming(stop_wish="enough")).record.ending
    assert ending
    assert (ending.state, ending.exit_code, ending.reason) == (RunState.INTERRUPTED, ExitCode.TERMINATED, "enough")


# --- running ---------------------------------------------------------------------------------------------------------

STOPS: list[tuple[str, Sight, str]] = [  # empty: nothing is decided
    ("nothing happened", running(), ""),
    ("ready is no news", running(ready("a"), ready("b")), ""),
    ("a worker failed", running(report(FAILED, "b", failure=failure())), "rank 1 on host-b failed"),
    ("a process of ours failed", running(report(FAILED, "b")), "node host-b failed"),
    ("a node leaves", running(report(LEAVING, "a", reason="SIGTERM")), "node host-a leaves: SIGTERM"),
    ("a node stopped by itself", running(report(STOPPED, "a")), "node host-a had to stop its workers"),
    ("a peer found it gone", running(report(LOST, "a")), "node host-a was lost: its agent is gone"),
    ("the first of two", running(report(LOST, "a", 12), report(FAILED, "b", 11)), "node host-b failed"),
    ("a lease has lapsed", running(fenced=frozenset("b")), "node host-b was lost: it renewed its lease no more"),
    ("that of a node that had ended", running(report(FINISHED, "b"), fenced=frozenset("b")), ""),
    ("that of nobody", running(fenced=frozenset("z")), ""),
    ("a report of nobody", running(report(FAILED, "z")), ""),
    ("one has finished", running(report(FINISHED, "a")), ""),
    ("and its agent is gone then", running(report(FINISHED, "a"), report(LOST, "a")), ""),
    ("a user wants it", running(stop_wish="enough"), "enough"),
]


@pytest.mark.parametrize(("seen", "reason"), [case[1:] for case in STOPS], ids=[case[0] for case in STOPS])
def test_a_round_that_runs(seen: Sight, reason: str) -> None:
    if reason:
        assert becomes(seen) == (1, Phase.STOPPING, reason)
        assert decided(seen).record.nonce == "n"
    else:
        assert decide(seen) is None


def test_the_run_has_succeeded_when_every_member_has_finished() -> None:
    ending = decided(running(report(FINISHED, "a"), report(FINISHED, "b"), stop_wish="too late")).record.ending
    assert ending
    assert (ending.state, ending.exit_code) == (RunState.SUCCEEDED, ExitCode.OK)


GROWS: list[tuple[str, dict[str, Any], str | float | None]] = [
    ("a node comes below the maximum", {}, "node host-c joins"),
    ("two do", {"nodes": "abcd"}, "node host-c, host-d joins"),
    ("a moment ago", {"arrival_at": NOW - 0.1}, NOW - 0.1 + JOIN_FOLD_S),
    ("at the maximum it is a spare", {"settings": RunSettings(2, 2)}, None),
    ("at restarts only", {"settings": TWO_TO_FOUR._replace(join=Join.AT_RESTART)}, None),
    (
        "once nobody came for a while",
        {"settings": TWO_TO_FOUR._replace(join=Join.SETTLE, join_settle_s=30.0)},
        NOW + 20,
    ),
    ("a host that was set aside", {"away": frozenset({"host-c"})}, None),
]


@pytest.mark.parametrize(("changes", "expected"), [case[1:] for case in GROWS], ids=[case[0] for case in GROWS])
def test_a_job_grows(changes: dict[str, Any], expected: str | float | None) -> None:
    decision = decide(running(**{"nodes": "abc", **changes}))
    if isinstance(expected, str):
        assert isinstance(decision, Decision)
        assert (decision.record.phase, decision.record.reason) == (Phase.STOPPING, expected)
    else:
        assert decision == (LookAgain(expected) if expected else None)


@pytest.mark.parametrize("kind", [FINISHED, LEAVING])
def test_a_job_does_not_grow_when_it_ends_or_the_newcomer_leaves(kind: Kind) -> None:
    assert decide(running(report(kind, "a" if kind is FINISHED else "c"), nodes="abc")) is None


def test_a_node_that_did_not_get_ready_in_time_stops_the_job_no_more() -> None:
    formed = decided(forming(ready("a"), ready("b"), nodes="abc", round=2)).record
    again = running(nodes="abc")._replace(round=formed._replace(nonce="n"))
    assert decide(again) is None
    stopped = decided(again._replace(stop_wish=None, fenced=frozenset("b"))).record
    assert stopped.phase is Phase.STOPPING


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [STOPPED, FENCED, FINISHED])
def test_a_round_is_over_when_each_member_is_proved_to_have_ended(kind: Kind) -> None:
    assert becomes(stopping(report(STOPPED, "a"), report(kind, "b")))[:2] == (2, Phase.FORMING)
    assert becomes(stopping(report(STOPPED, "a"), fenced=frozenset("b")))[:2] == (2, Phase.FORMING)


@pytest.mark.parametrize("kind", [FAILED, LEAVING, LOST, Kind.READY])
def test_nothing_else_proves_it(kind: Kind) -> None:
    assert decide(stopping(report(STOPPED, "a"), report(kind, "b"))) is None


def test_the_next_round_has_no_members_yet_and_knows_who_comes() -> None:
    decision = decided(stopping(report(STOPPED, "a"), report(LEAVING, "b"), report(STOPPED, "b"), nonce="old"))
    record = decision.record
    assert (record.nonce, record.elders, record.expected) == ("", (), 1)
    assert decision.assigns == ()


def test_nodes_come_and_go_without_costing_a_restart() -> None:
    for reports in (
        (*ALL_STOPPED,),
        (*ALL_STOPPED, report(LEAVING, "a", 5)),
        (report(STOPPED, "a"), report(LOST, "b", 5), report(FENCED, "b")),
    ):
        record = decided(stopping(*reports, settings=ONE_RESTART)).record
        assert (record.phase, record.restarts) == (Phase.FORMING, 0)


def fails(name: str, revision: int) -> Any:
    return report(FAILED, name, revision, failure=failure(f"host-{name}"))


@pytest.mark.parametrize(
    ("reports", "host"),
    [
        ((fails("a", 5), fails("b", 6)), "host-a"),
        ((fails("a", 6), fails("b", 5)), "host-b"),
        ((report(LEAVING, "b", 4), fails("a", 5)), None),
        ((report(LEAVING, "b", 6), fails("a", 5)), "host-a"),
        ((report(LOST, "b", 4), fails("a", 5)), None),
        ((report(FAILED, "a", 5),), "host-a"),
    ],
    ids=["the first", "by revision", "after a leave", "before a leave", "after a loss", "without details"],
)
def test_the_root_cause_is_the_first_that_happened(reports: tuple[Any, ...], host: str | None) -> None:
    record = decided(stopping(*ALL_STOPPED, *reports, settings=ONE_RESTART)).record
    assert (record.phase, record.number) == (Phase.FORMING, 2)
    assert (record.restarts, record.streak_host) == ((1, host) if host else (0, ""))


def test_a_lost_node_makes_victims_of_all_failures() -> None:
    seen = stopping(fails("a", 5), report(STOPPED, "a"), report(FENCED, "b", 30), settings=ONE_RESTART)
    record = decided(seen).record
    assert (record.restarts, record.reason) == (0, "node host-b was lost")


def test_the_details_that_come_with_the_stop_are_told() -> None:
    detailed = failure(last_output=("Killed",))
    seen = stopping(fails("a", 5), report(STOPPED, "a", 20, failure=detailed), report(STOPPED, "b", 21))
    ending = decided(seen).record.ending
    assert ending
    assert ending.failure == detailed


def test_nodes_that_were_proved_gone_are_dropped_at_once() -> None:
    assert decided(stopping(report(STOPPED, "a"), report(FENCED, "b"))).dropped == ("b",)
    assert decided(stopping(report(STOPPED, "a"), fenced=frozenset("b"))).dropped == ()
    names = "".join(chr(0x4E00 + i) for i in range(MOST_DROPPED + 50))
    seen = stopping(*(report(FENCED, name) for name in names), of=names, nodes="")
    assert len(decided(seen).dropped) == MOST_DROPPED


def test_a_wish_to_stop_ends_the_run_when_all_have_stopped() -> None:
    assert decide(stopping(report(STOPPED, "a"), stop_wish="enough")) is None
    ending = decided(stopping(*ALL_STOPPED, fails("a", 5), stop_wish="enough")).record.ending
    assert ending
    assert ending.state is RunState.INTERRUPTED


# --- restarts --------------------------------------------------------------------------------------------------------


def after_failure(settings: RunSettings, told: Any = None, **changes: Any) -> Decision:
    told = told or failure()
    first = report(FAILED, "a", 5, failure=told)
    return decided(stopping(*ALL_STOPPED, first, settings=settings, **changes))


def test_the_budget_of_restarts_is_one_for_the_job() -> None:
    record = after_failure(TWO_TO_FOUR._replace(max_restarts=2), restarts=1).record
    assert (record.phase, record.restarts) == (Phase.FORMING, 2)
    ending = after_failure(TWO_TO_FOUR._replace(max_restarts=2), restarts=2).record.ending
    assert ending
    assert (ending.state, ending.exit_code, ending.restarts_used) == (RunState.FAILED, 3, 2)
    assert ending.reason == "all 2 restarts were used (--max-restarts 2)"


def test_no_restarts_are_allowed_unless_asked_for() -> None:
    ending = after_failure(TWO_TO_FOUR).record.ending
    assert ending
    assert ending.reason == "no restarts were allowed (--max-restarts 0)"


def test_in_a_window_restarts_are_forgotten_as_they_age() -> None:
    windowed = ONE_RESTART._replace(restart_window_s=60.0)
    assert after_failure(windowed, restart_ages_s=(49.9,)).record.phase is Phase.CLOSED  # seen 10 s ago
    record = after_failure(windowed, restart_ages_s=(50.0,), restarts=7).record
    assert (record.phase, record.restarts, record.restart_ages_s) == (Phase.FORMING, 8, (0.0,))


@pytest.mark.parametrize(("used", "delay_s"), [(0, 2.0), (1, 4.0), (2, 8.0), (3, 10.0), (4000, 10.0)])
def test_the_backoff_doubles_up_to_its_maximum(used: int, delay_s: float) -> None:
    settings = TWO_TO_FOUR._replace(max_restarts=5000, backoff_s=2.0, backoff_max_s=10.0)
    assert after_failure(settings, restarts=used).record.delay_s == delay_s


def test_the_same_mistake_each_time_ends_the_run_early() -> None:
    settings = TWO_TO_FOUR._replace(max_restarts=100)
    mark = mark_of(raised(7))
    ending = after_failure(settings, raised(7), marks=(mark,) * (ALIKE - 1)).record.ending
    assert ending
    assert "--no-early-stop" in ending.reason
    other = after_failure(settings, raised(8), marks=(mark,) * (ALIKE - 1)).record
    assert (other.phase, other.marks[-1]) == (Phase.FORMING, "ValueError@train.py:8")
    patient = settings._replace(early_stop=False)
    assert after_failure(patient, raised(7), marks=(mark,) * (ALIKE - 1)).record.phase is Phase.FORMING


@pytest.mark.parametrize(
    ("told", "mark"),
    [
        (raised(7), "ValueError@train.py:7"),
        (raised(7, lifetime_s=EARLY_S), ""),
        (failure(code=4, lifetime_s=1.0), "exit 4"),
        (failure(kind=FailureKind.SIGNAL, lifetime_s=1.0), ""),
        (failure(status=None, lifetime_s=1.0), ""),
    ],
    ids=["an exception", "a late one", "an exit code", "a signal", "no status"],
)
def test_what_makes_two_failures_alike(told: Any, mark: str) -> None:
    assert mark_of(told) == mark


def test_a_host_that_fails_again_and_again_is_set_aside_where_there_are_others() -> None:
    settings = TWO_TO_FOUR._replace(max_restarts=100, max_node_failures=3)
    again = {"streak": 2, "streak_host": "host-a", "nodes": "abc"}
    decision = after_failure(settings, **again)
    assert (decision.set_aside, decision.record.streak, decision.record.streak_host) == ("host-a", 0, "")
    waited_for = after_failure(settings, **{**again, "streak": 1}).record.expected
    assert decision.record.expected == waited_for - 1, "the round does not wait for the host that was set aside"
    assert after_failure(settings, **{**again, "streak": 1}).set_aside == ""
    assert after_failure(settings, **{**again, "nodes": "ab"}).set_aside == ""  # not without a replacement
    assert after_failure(settings, **{**again, "streak_host": "host-b"}).record.streak == 1
    assert after_failure(settings._replace(max_node_failures=None), **again).set_aside == ""


# --- closed ----------------------------------------------------------------------------------------------------------


def test_nothing_follows_the_end() -> None:
    assert decide(sight(Phase.CLOSED, report(FAILED, "a"), stop_wish="enough")) is None


def test_every_decision_moves_the_round_forward() -> None:
    seen = [
        forming(ready("a"), ready("b")),
        forming(stop_wish="x"),
        running(report(FAILED, "a")),
        stopping(*ALL_STOPPED),
        stopping(*ALL_STOPPED, fails("a", 5)),
    ]
    for one in seen:
        after = decided(one).record
        assert (after.number, after.phase.order) > (one.round.number, one.round.phase.order)


def test_decisions_are_the_same_whatever_the_order_of_what_is_seen() -> None:
    seen = forming(*map(ready, "abcde"), nodes="edcba")
    other = seen._replace(
        nodes={name: node(name) for name in "abcde"}, reports=dict(reversed(list(seen.reports.items())))
    )
    assert decide(seen) == decide(other)
