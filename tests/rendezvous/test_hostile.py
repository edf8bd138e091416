"""Whatever somebody writes or deletes under a run's keys: a sentence, or no effect; no exception, and no two worlds.

`World` asserts the last two at every step; it encodes every request for etcd too, which takes no key that is not text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dlaunch.outcome import RunState
from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.keys import Keys
from dlaunch.rendezvous.records import (
    Kind,
    NodeRecord,
    Phase,
    ReportRecord,
    RoundRecord,
    RunSettings,
    SpecRecord,
    read_assign,
    write_assign,
    write_node,
    write_report,
    write_round,
    write_spec,
)
from dlaunch.rendezvous.store import GrantLease, Put, Request, StoreError, Trouble, Txn

from .member_world import Node, World

GARBAGE = {
    "nothing": b"",
    "not UTF-8": b"\xff\xfe\x00\xd8",
    "not JSON": b"round 3, please",
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "deeply nested lists": b"[" * 100_000,
    "deeply nested objects": b'{"phase":' * 100_000,
    "a megabyte of nothing": b" " * 1_000_000,
    "a megabyte of text": json.dumps({"reason": "x" * 1_000_000}).encode(),
    "not a number": b'{"number": NaN, "expected": Infinity}',
    "a number without end": b'{"number": 1' + b"0" * 5000 + b"}",
    "wrong types": b'{"number": "1", "phase": [], "address": 7, "settings": 1, "kind": {}, "failure": [], "first": 1}',
    "half of a character": b'{"reason": "\\ud800", "phase": "\\udfff"}',
}


def ghost(node_id: str = "000000000001-ghost", **changes: Any) -> NodeRecord:
    """A registration behind which there is no agent."""
    return NodeRecord(node_id, "10.9.9.9:1", "ghost", "boot", 2, "default")._replace(**changes)


def ends_well(world: World, nodes: list[Node]) -> None:
    """The run goes on as if nothing had been, and ends."""
    world.until(lambda: all(node.running for node in nodes))
    for node in nodes:
        node.finish()
    world.until(lambda: all(node.has_ended for node in nodes))
    for node in nodes:
        assert isinstance(node.ended, effects.EndRun), node
        assert node.ended.ending.state is RunState.SUCCEEDED


def ends_with_sentences(world: World, nodes: list[Node]) -> None:
    """Every node stops its workers, says why, and ends."""
    stops_with_sentences(world, nodes)
    world.until(lambda: all(node.has_ended for node in nodes))


def stops_with_sentences(world: World, nodes: list[Node]) -> None:
    """Every node stops its workers and says why, at once."""
    world.until(lambda: all(node.sentence and not node.running for node in nodes))
    for node in nodes:
        assert node.sentence.count("\n") == 0
        assert node.sentence.endswith(".")


# --- garbage ---------------------------------------------------------------------------------------------------------

WITHOUT_EFFECT = (
    "spec",
    "nodes/x",
    "nodes/",
    "nodes/a/b",
    "assign/{nonce}/x",
    "assign/x",
    "assign/",
    "assign/other/x",
    "report/1/x/ready",
    "report/1/x/unknown",
    "report/1/x",
    "report/x",
    "report/",
    "report/-1/x/ready",
    "away/x",
    "away/%",
    "control/",
    "control/stopping",
    "control/resize",
    "something/else",
    "",
    "round/1",
    "specs",
)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_garbage_beside_the_decision_record_changes_nothing(name: str) -> None:
    world = World()
    nodes = world.running()
    key = world.keys.root + name.format(nonce=world.round.nonce)
    (before,) = world.read(key) or (None,)
    for value in GARBAGE.values():
        world.put(key, value)
        world.run_for(0.1)
        world.delete(key)
        world.run_for(0.1)
    if before:
        world.put(key, before.value)
    world.run_for(5)
    assert all(node.running == 1 for node in nodes), world.story()
    ends_well(world, nodes)


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_decision_record_stops_every_node_with_a_sentence(value: bytes) -> None:
    world = World()
    nodes = world.running()
    world.put(world.keys.round, value)
    stops_with_sentences(world, nodes)
    assert all(world.keys.round in node.sentence and "--rdzv-id" in node.sentence for node in nodes)


@pytest.mark.parametrize("key", ["spec", "round"])
@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_a_node_that_finds_garbage_does_not_take_part(key: str, value: bytes) -> None:
    world = World()
    world.running()
    world.put(world.keys.root + key, value)
    (late,) = world.join(1)
    stops_with_sentences(world, [late])
    assert world.keys.root + key in late.sentence


def test_garbage_is_told_of_once_by_those_who_see_it() -> None:
    world = World()
    nodes = world.running()
    for _ in range(3):
        world.put(world.keys.node("x"), b"garbage")
        world.run_for(10)
    told = [text for node in nodes for text in node.said if "nodes/x" in text]
    assert len(told) == 2, told
    assert "something else than JSON" in told[0]


def test_a_flood_of_garbage_is_told_of_in_a_few_lines() -> None:
    world = World()
    nodes = world.running()
    for i in range(500):
        world.put(world.keys.node(f"x{i}"), b"garbage")
    world.run_for(10)
    assert all(len(node.said) <= 25 for node in nodes)
    ends_well(world, nodes)


# --- values that look right ------------------------------------------------------------------------------------------

HALF = "\ud800"  # JSON can say it, UTF-8 cannot

LOOKS_RIGHT: dict[str, Callable[[World], Put]] = {
    "a registration without an agent": lambda w: Put(w.keys.node("000-x"), write_node(ghost())),
    "one with half of a character": lambda w: Put(w.keys.node("000-x"), write_node(ghost(host=HALF))),
    "one of a huge node": lambda w: Put(w.keys.node("000-x"), write_node(ghost(local_world_size=1 << 62))),
    "one that wants a huge rank": lambda w: Put(w.keys.node("000-x"), write_node(ghost(node_rank=1 << 62))),
    "one with a line break": lambda w: Put(w.keys.node("000-x"), write_node(ghost(host="a\nb"))),
    "one without a name": lambda w: Put(w.keys.nodes, write_node(ghost())),
    "a report of nobody": lambda w: _report(w, "nobody", Kind.FAILED),
    "a stop of nobody": lambda w: _report(w, "nobody", Kind.STOPPED),
    "a fence of nobody": lambda w: _report(w, "nobody", Kind.FENCED),
    "a report of another round": lambda w: Put(
        w.keys.report(99, "nobody", "failed"), write_report(ReportRecord(99, "nobody", Kind.FAILED, 0))
    ),
    "a report with an empty name": lambda w: _report(w, "", Kind.FAILED),
    "a host set aside that nobody is": lambda w: Put(w.keys.away_host("ghost"), b"{}"),
    "an assignment of another nonce": lambda w: Put(w.keys.assign("other", "x"), _an_assignment(w)),
}


def _report(world: World, node_id: str, kind: Kind) -> Put:
    number = world.round.number
    return Put(world.keys.report(number, node_id, kind.value), write_report(ReportRecord(number, node_id, kind, 0)))


def _an_assignment(world: World, **changes: Any) -> bytes:
    kv = world.read(world.keys.assigns(world.round.nonce), prefix=True)[0]
    return write_assign(read_assign(kv.key, kv.value)._replace(**changes))


@pytest.mark.parametrize("make", LOOKS_RIGHT.values(), ids=LOOKS_RIGHT)
def test_well_formed_values_of_nobody_change_nothing_in_a_whole_job(make: Callable[[World], Put]) -> None:
    world = World()
    nodes = world.running()
    world.write(make(world))
    world.run_for(10)
    assert all(node.running == 1 for node in nodes), world.story()
    ends_well(world, nodes)


@pytest.mark.parametrize("make", LOOKS_RIGHT.values(), ids=LOOKS_RIGHT)
def test_and_a_restart_leaves_them_out(make: Callable[[World], Put]) -> None:
    world = World(RunSettings(2, 3, max_restarts=1, settle_s=0.1))
    nodes = world.running()
    world.write(make(world))
    world.run_for(1)
    world.until(lambda: all(node.running for node in nodes))
    nodes[0].fail()
    world.until(lambda: all(node.running > 1 for node in nodes))
    assert all(len(world.read(world.keys.assigns(world.round.nonce), prefix=True)) == 2 for _ in nodes)


def test_a_registration_without_an_agent_stops_a_job_that_has_room_once_at_most() -> None:
    world = World(RunSettings(2, 4, settle_s=0.1))
    nodes = world.running()
    world.put(world.keys.node("000-x"), write_node(ghost()))
    world.run_for(60)
    assert max(len(node.assignments) for node in nodes) <= 2, world.round


ROUNDS: dict[str, dict[str, Any]] = {
    "elders with half of a character": {"elders": (HALF,)},
    "elders of nobody": {"elders": ("nobody",) * 8},
    "an elder without a name": {"elders": ("",)},
    "a nonce with half of a character": {"nonce": HALF},
    "a nonce that names no assignments": {"nonce": "nothing"},
    "no nonce": {"nonce": ""},
    "a long delay": {"phase": Phase.STOPPING, "delay_s": 1e14},
    "long marks": {"marks": ("x" * 20_000,) * 15},
    "a reason in several lines": {"phase": Phase.STOPPING, "reason": "a\nb\x1b[2J"},
}


@pytest.mark.parametrize("changes", ROUNDS.values(), ids=ROUNDS)
def test_a_decision_that_none_of_us_wrote_ends_in_a_running_job_or_in_sentences(changes: dict[str, Any]) -> None:
    world = World()
    nodes = world.running()
    world.put(world.keys.round, write_round(world.round._replace(**changes)))
    world.run_for(30)
    if any(node.sentence for node in nodes):
        ends_with_sentences(world, nodes)
    else:
        ends_well(world, nodes)


def test_a_round_number_that_goes_back_stops_every_node_and_says_so() -> None:
    world = World(RunSettings(2, 2, max_restarts=1, settle_s=0.1))
    nodes = world.running()
    first = world.read(world.keys.round)[0].value
    nodes[0].fail()
    world.until(lambda: all(node.running == 2 for node in nodes))
    world.put(world.keys.round, first)
    ends_with_sentences(world, nodes)
    assert "round" in nodes[0].sentence


def test_a_revision_lower_than_was_seen_stops_every_node_and_says_so() -> None:
    world = World()
    nodes = world.join(2)
    world.run_for(0.005)
    snapshot = world.memory.copy()
    world.until(lambda: all(node.running for node in nodes))
    for i in range(50):
        world.put(f"/elsewhere/{i}", b"")
    world.run_for(3)
    world.memory = snapshot
    ends_with_sentences(world, nodes)
    assert all("restored from an older state" in node.sentence for node in nodes)


def test_an_answer_about_a_lease_proves_no_restore() -> None:
    """etcd fills its header from a member that may lag behind: v3.5 server/etcdserver/api/v3rpc/lease.go."""
    world = World()
    nodes = world.running()
    for node in nodes:
        node.lags_in_leases = True
    world.put("/elsewhere", b"")
    world.run_for(10)
    assert not any(node.sentence for node in nodes), nodes[0].sentence
    ends_well(world, nodes)


# --- assignments -----------------------------------------------------------------------------------------------------

ASSIGNMENTS: dict[str, dict[str, Any]] = {
    "of a rank beyond the world": {"group_rank": 7},
    "of ranks beyond the world": {"base_rank": 4},
    "of more workers than the node has": {"local_world_size": 1 << 40, "world_size": 1 << 41},
    "with half of a character": {"meeting_address": HALF},
    "with a null byte": {"meeting_address": "a\0b"},
    "with a port that is none": {"meeting_port": 1 << 20},
}


@pytest.mark.parametrize("changes", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_an_assignment_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    world = World()
    nodes = world.join(2)
    world.until(lambda: bool(world.read(world.keys.root + "assign/", prefix=True)))
    kv = world.read(world.keys.root + "assign/", prefix=True)[-1]
    world.put(kv.key, write_assign(read_assign(kv.key, kv.value)._replace(**changes)))
    victim = next(node for node in nodes if node.member.node_id == kv.key.rpartition("/")[2])
    world.until(lambda: bool(victim.sentence or victim.assignments))
    assert not victim.assignments
    assert kv.key in victim.sentence


def test_two_nodes_of_one_rank_never_run_together() -> None:
    world = World()
    world.join(2)
    world.until(lambda: len(world.read(world.keys.root + "assign/", prefix=True)) == 2)
    first, second = world.read(world.keys.root + "assign/", prefix=True)
    theirs = read_assign(first.key, first.value)
    world.put(second.key, write_assign(theirs._replace(node_id="", successor=None)))
    world.run_for(10)  # the world checks that no rank runs twice


# --- missing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["round", "", "spec"])
def test_deleted_keys_of_a_running_job_are_told_of_or_change_nothing(key: str) -> None:
    world = World()
    nodes = world.running()
    world.delete(world.keys.root + key, prefix=not key)
    world.run_for(5)
    if key == "spec":
        ends_well(world, nodes)
    else:
        ends_with_sentences(world, nodes)
        assert "deleted" in nodes[0].sentence


def test_a_newcomer_to_a_run_without_its_spec_begins_no_second_world() -> None:
    world = World(RunSettings(1, 2, settle_s=0.1))
    nodes = world.running(1)
    nodes[0].stopping_takes_s = 20
    world.delete(world.keys.spec)
    (late,) = world.join(1)
    world.run_for(30)
    assert late.sentence or not late.assignments or late.assignments[0].round > 1


def test_a_deleted_registration_of_a_live_node_begins_no_second_world() -> None:
    world = World(RunSettings(1, 2, settle_s=0.1))
    nodes = world.running(2)
    for node in nodes:
        node.stopping_takes_s = 4
    world.delete(world.keys.node(nodes[1].member.node_id))
    nodes[0].stopping_takes_s = 0.01
    world.run_for(30)  # the world checks that no two run
    world.until(lambda: all(node.running for node in nodes))


def test_deleted_assignments_do_not_leave_a_job_without_decisions() -> None:
    world = World(RunSettings(2, 2, max_restarts=1, settle_s=0.1))
    nodes = world.running()
    world.delete(world.keys.assigns(world.round.nonce), prefix=True)
    world.run_for(1)
    nodes[0].fail()
    world.until(lambda: all(node.running == 2 or node.sentence or node.has_ended for node in nodes))


def test_a_deleted_report_is_not_missed() -> None:
    world = World()
    nodes = world.running()
    world.delete(world.keys.every_report, prefix=True)
    world.run_for(1)
    ends_well(world, nodes)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param("1" * 5000, id="5000 digits"),
        *("\u0661", "x", "-1", "1.5", ""),
    ],
)
def test_a_deleted_report_of_an_odd_number_is_no_matter(number: str) -> None:
    world = World()
    nodes = world.running()
    key = f"{world.keys.every_report}{number}/x/ready"
    world.put(key, write_report(ReportRecord(1, "x", Kind.READY, 0)))
    world.run_for(0.1)
    world.delete(key)
    world.run_for(1)
    ends_well(world, nodes)


# --- leases and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [0, 4711])
def test_a_run_whose_lease_is_gone_is_told_of(lease: int) -> None:
    world = World()
    spec = SpecRecord(world.settings.run, "token", lease)
    world.write(
        Put(world.keys.spec, write_spec(spec)),
        Put(world.keys.round, write_round(RoundRecord(1, Phase.FORMING, "the run begins"))),
    )
    nodes = world.join(2)
    world.run_for(30)
    assert any(node.sentence or node.said for node in nodes), world.story()


FULL = StoreError(Trouble.OTHER, "etcd is full (mvcc: database space exceeded): 127.0.0.1:2379.")
DENIED = StoreError(Trouble.DENIED, "etcd refuses the user: 127.0.0.1:2379.")


def _refuse_writes(error: StoreError) -> Callable[[Request], StoreError | None]:
    def answer(request: Request) -> StoreError | None:
        is_write = isinstance(request, Txn) and any(isinstance(operation, Put) for operation in request.success)
        return error if is_write or isinstance(request, GrantLease) else None

    return answer


@pytest.mark.parametrize("error", [FULL, DENIED], ids=["full", "denied"])
def test_a_store_that_takes_no_writes_is_told_of_and_not_hammered(error: StoreError) -> None:
    world = World()
    node = world.add()
    node.refuses = _refuse_writes(error)
    node.handle(events.Join())
    world.run_for(5)
    assert len(node.asked) < 200, "it asks without a pause"
    world.run_for(30)
    assert error.sentence in node.sentence or error.sentence in node.said


@pytest.mark.parametrize("error", [FULL, DENIED], ids=["full", "denied"])
def test_so_is_one_that_takes_none_any_more(error: StoreError) -> None:
    world = World()
    nodes = world.running()
    for node in nodes:
        node.refuses = _refuse_writes(error)
    nodes[0].fail()
    before = len(nodes[0].asked)
    world.run_for(5)
    assert len(nodes[0].asked) - before < 200, "it asks without a pause"
    world.run_for(30)
    assert any(error.sentence in text for node in nodes for text in (*node.said, node.sentence))


# --- another run -----------------------------------------------------------------------------------------------------

NEIGHBOURS = [
    ("exp", "exp7"),
    ("a", "a/b"),
    ("a", "a/nodes"),
    ("ä", "ä\u0308"),
    ("nodes", "nodes/x"),
    (".", ".."),
    ("%", "%25"),
]


@pytest.mark.parametrize(("one", "other"), NEIGHBOURS)
def test_runs_do_not_see_each_other(one: str, other: str) -> None:
    ours, theirs = Keys.of("/dlaunch", one), Keys.of("/dlaunch", other)
    assert not theirs.root.startswith(ours.root)
    assert not ours.root.startswith(theirs.root)
    world = World(run_id=one)
    neighbour = World(run_id=other)
    neighbour.memory = world.memory
    nodes, strangers = world.join(2), neighbour.join(2)
    for _ in range(100):
        world.run_for(0.01)
        neighbour.run_for(0.01)
    assert all(node.running == 1 and node.assignment and node.assignment.group_world_size == 2 for node in nodes)
    neighbour.delete(theirs.root, prefix=True)
    neighbour.run_for(5)
    world.run_for(5)
    assert all(node.sentence for node in strangers)
    ends_well(world, nodes)


def test_a_run_id_of_bytes_that_are_no_text_has_keys() -> None:
    assert Keys.of("/dlaunch", "exp\udcff").root.isascii()


# --- peers -----------------------------------------------------------------------------------------------------------

ENDLESS = 10**400  # JSON can say it, a float cannot hold it
MESSAGES: list[dict[str, Any]] = [
    {},
    {"kind": None, "round": 1},
    {"kind": [], "round": 1},
    {"kind": "vouch_me", "round": 1},
    {"kind": "vouch_me", "round": 1, "asked_at": "now"},
    {"kind": "promise_me", "round": 1, "asked_at": ENDLESS},
    {"kind": "promise_me", "round": 1, "asked_at": float("nan")},
    {"kind": "promise", "round": 1, "asked_at": float("nan")},
    {"kind": "promise", "round": 1, "asked_at": ENDLESS},
    {"kind": "vouch", "round": 1, "asked_at": float("-inf"), "for_s": float("inf")},
    {"kind": "vouch", "round": 1, "asked_at": ENDLESS, "for_s": ENDLESS},
    {"kind": "vouch", "round": 1, "asked_at": 0, "for_s": 1e300},
    {"kind": "vouch", "round": True, "asked_at": True, "for_s": True},
]


@pytest.mark.parametrize(
    "message",
    MESSAGES,
    ids=[f"{i}-{message.get('kind')}" for i, message in enumerate(MESSAGES)],
)
def test_what_a_peer_says_is_not_taken_on_trust(message: dict[str, Any]) -> None:
    world = World()
    nodes = world.running()
    for node in nodes:
        for sender in (*(other.member.node_id for other in nodes), "stranger"):
            before = node.deadline
            node.handle(events.PeerSaid(sender, message))
            assert node.deadline == before
    ends_well(world, nodes)
