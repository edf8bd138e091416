"""A rule is broken on purpose, and the simulator has to find it: else its silence would mean nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from dlaunch.rendezvous import decide
from dlaunch.rendezvous.lapses import Lapses
from dlaunch.rendezvous.member import Member
from dlaunch.rendezvous.proofs import Proofs
from dlaunch.rendezvous.registration import Registration
from dlaunch.rendezvous.store import Answer, LeaseAlive, StoreError
from dlaunch.rendezvous.vouching import Message, ToPeer, Vouching
from dlaunch.simulation.invariants import Violation
from dlaunch.simulation.node import Agent
from dlaunch.simulation.plan import draw_plan
from dlaunch.simulation.run import shrink, simulate
from dlaunch.simulation.scenario import SCENARIOS
from dlaunch.simulation.starter import Starter

SEEDS = 300  # the slowest of these is found after some 60


def first_found(rules: Collection[str]) -> tuple[int, Violation]:
    """The first seed that breaks one of these rules."""
    for seed in range(SEEDS):
        found = simulate(draw_plan(seed)).violation
        if found is not None and found.rule in rules:
            return seed, found
    raise AssertionError(f"nothing was found in {SEEDS} seeds")


def test_a_lapsed_lease_that_is_taken_for_a_proof_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Proofs.listed

    def hasty(self: Proofs, members: Collection[str], registered: Collection[str], **known: Any) -> None:
        listed(self, members, registered, **(known | {"me": known["me"] or "nobody", "promised_until": float("-inf")}))

    monkeypatch.setattr(Proofs, "listed", hasty)
    first_found({"promises", "2 barrier", "2 one world at a time"})


def test_a_round_that_does_not_wait_for_the_last_one_to_stop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_ended", lambda sight, member: True)
    first_found({"2 barrier", "2 one world at a time"})


def test_a_starter_that_keeps_no_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Starter, "look_at_deadline", lambda self: None)
    story = SCENARIOS["a kill that is late because the agent is frozen"]
    found = simulate(story.plan).violation
    assert found is not None
    assert found.rule == "promises"


@pytest.mark.parametrize(
    ("wait", "story"),
    [
        ("_promise_s", "no promise is given by a member that has failed"),
        ("_limit", "a spare does not fence members that vouch for each other"),
    ],
)
def test_a_wait_that_is_left_out_is_found(wait: str, story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Proofs.listed

    def impatient(self: Proofs, *seen: Any, **known: Any) -> None:
        monkeypatch.setattr(self, wait, 0.0)
        listed(self, *seen, **known)

    monkeypatch.setattr(Proofs, "listed", impatient)
    found = simulate(SCENARIOS[story].plan).violation
    assert found is not None
    assert found.rule in {"2 barrier", "promises"}


def breaks(story: str) -> None:
    """A story that ends well as the code is ends badly as it was changed."""
    found = simulate(SCENARIOS[story].plan).violation
    assert found is not None
    assert found.rule in {"2 barrier", "promises"}


def test_a_renewal_that_counts_from_its_receipt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Registration._extend
    monkeypatch.setattr(Registration, "_extend", lambda self, _sent_at: extend(self, self._desk.now))
    breaks("a renewal whose answer is slow")


def test_a_vouch_that_counts_from_its_receipt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Vouching.heard_vouch

    def late(self: Vouching, message: Message, now: float, *limits: float) -> float | None:
        return heard(self, message | {"asked_at": now}, now, *limits)

    monkeypatch.setattr(Vouching, "heard_vouch", late)
    breaks("a vouch that is read late")


def test_a_promise_that_counts_from_its_receipt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Vouching.heard_promise

    def late(self: Vouching, sender: str, message: Message, now: float) -> list[ToPeer]:
        return heard(self, sender, message | {"asked_at": now}, now)

    monkeypatch.setattr(Vouching, "heard_promise", late)
    breaks("a promise that comes late")


def test_a_key_that_is_gone_and_is_taken_for_a_lease_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = Lapses._looked_at

    def is_gone(self: Lapses, member: str, lease: int, _answer: Answer | StoreError) -> None:
        looked_at(self, member, lease, LeaseAlive(1, 0))

    monkeypatch.setattr(Lapses, "_looked_at", is_gone)
    breaks("a registration is deleted by hand")


def test_a_wish_for_a_rank_that_nobody_hears_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "in_rank_order", lambda nodes: sorted(nodes, key=lambda node: node.node_id))
    found = simulate(SCENARIOS["roles, and ranks that are wished for"].plan).violation
    assert found is not None
    assert found.rule == "1 ranks"


def test_a_promise_that_is_given_after_a_failure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "_simply_runs", lambda self: self._my_assign() is not None)
    story = SCENARIOS["no promise is given by a member that has failed"]
    found = simulate(story.plan).violation
    assert found is not None
    assert found.rule == "2 barrier"


def test_an_address_that_refuses_before_all_workers_are_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "is_buried", lambda self: not self.lives)
    first_found({"proofs", "2 barrier"})


def test_what_was_found_can_be_told_with_fewer_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_ended", lambda sight, member: True)
    seed, found = first_found({"2 barrier"})
    plan = draw_plan(seed)
    short = shrink(plan, found.rule)
    assert len(short.faults) <= len(plan.faults)
    again = simulate(short, tells=True)
    assert again.violation is not None
    assert again.violation.rule == found.rule
    assert str(again.violation) in again.story.text()
