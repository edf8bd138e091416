"""Promises and vouches: every time counts from when it was asked for, and nobody is left out."""

from __future__ import annotations

from typing import Any

import pytest

from dlaunch.rendezvous.values import Peer
from dlaunch.rendezvous.vouching import ToPeer, Vouching

TTL_S, LIMIT_S = 5.0, 120.0
T = 1000.0  # some time; each agent has a clock of its own
PEERS = tuple(Peer(name, f"10.0.0.1:{port}") for port, name in enumerate("abc", 1))


def first() -> Vouching:
    """Group rank 0 of round 1, which is a; b and c are the others."""
    vouching = Vouching(TTL_S)
    vouching.enter(1, PEERS)
    return vouching


def member() -> Vouching:
    """Another member of round 1."""
    vouching = Vouching(TTL_S)
    vouching.enter(1, ())
    return vouching


def wish(at: float, **changes: Any) -> dict[str, Any]:
    return {"kind": "vouch_me", "round": 1, "asked_at": at, **changes}


def promise(asked_at: float, **changes: Any) -> dict[str, Any]:
    return {"kind": "promise", "round": 1, "asked_at": asked_at, **changes}


def vouch(asked_at: float, for_s: float, **changes: Any) -> dict[str, Any]:
    return {"kind": "vouch", "round": 1, "asked_at": asked_at, "for_s": for_s, **changes}


def whom(messages: list[ToPeer]) -> str:
    return "".join(sorted(one.node_id for one in messages))


def all_promise(rank0: Vouching, asked_at: float, now: float) -> list[ToPeer]:
    return [sent for name in "abc" for sent in rank0.heard_promise(name, promise(asked_at), now)]


# --- group rank 0 ----------------------------------------------------------------------------------------------------


def test_every_member_is_asked_for_a_promise_and_so_is_rank_0_itself() -> None:
    asked = first().heard_wish("b", wish(77.0), T)
    assert whom(asked) == "abc"
    assert {one.message["kind"] for one in asked} == {"promise_me"}


def test_nobody_is_vouched_for_before_all_have_promised() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    assert rank0.heard_promise("a", promise(T), T + 0.1) == []
    assert rank0.heard_promise("b", promise(T), T + 0.1) == []
    (sent,) = rank0.heard_promise("c", promise(T), T + 0.5)
    assert sent == ToPeer("b", vouch(77.0, TTL_S - 0.5))


def test_a_promise_counts_from_when_it_was_asked_for() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    assert [sent.message["for_s"] for sent in all_promise(rank0, T, T + 4)] == [TTL_S - 4]
    late = first()
    late.heard_wish("b", wish(77.0), T)
    assert all_promise(late, T, T + TTL_S) == []


def test_a_vouch_ends_with_the_earliest_promise() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    rank0.heard_promise("a", promise(T), T)
    rank0.heard_wish("b", wish(78.0), T + 2)
    rank0.heard_promise("b", promise(T + 2), T + 2)
    (sent,) = rank0.heard_promise("c", promise(T + 2), T + 3)
    assert sent.message["for_s"] == TTL_S - 3


def test_promises_are_renewed_while_anyone_asks_and_no_longer() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    assert rank0.collect(T + 1) == []  # a moment ago
    assert whom(rank0.collect(T + TTL_S / 4)) == "abc"
    assert rank0.collect(T + TTL_S) == []  # nobody has asked for a while


def test_a_promise_that_stands_serves_the_next_who_asks() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    all_promise(rank0, T, T)
    (sent,) = rank0.heard_wish("c", wish(50.0), T + 1)
    assert sent == ToPeer("c", vouch(50.0, TTL_S - 1))


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        ("z", wish(T)),
        ("b", wish(T, round=2)),
        ("b", {**wish(T), "asked_at": "now"}),
        ("b", {"kind": "vouch_me", "round": 1}),
    ],
)
def test_who_is_no_member_or_speaks_of_another_round_is_not_heard(sender: str, message: dict[str, Any]) -> None:
    assert first().heard_wish(sender, message, T) == []


@pytest.mark.parametrize("message", [promise(T, round=2), promise(T + 60), promise(float("nan")), promise(10**400)])
def test_a_promise_that_nobody_asked_for_counts_for_nothing(message: dict[str, Any]) -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    rank0.heard_promise("a", promise(T), T)
    rank0.heard_promise("b", promise(T), T)
    assert rank0.heard_promise("c", message, T) == []
    assert rank0.heard_promise("z", promise(T), T) == []


def test_a_new_round_forgets_promises_and_wishes() -> None:
    rank0 = first()
    rank0.heard_wish("b", wish(77.0), T)
    all_promise(rank0, T, T)
    rank0.enter(2, PEERS)
    assert rank0.collect(T + 2) == []
    assert whom(rank0.heard_wish("b", wish(78.0, round=2), T + 2)) == "abc"  # asked for anew, not vouched for


# --- those who promise -----------------------------------------------------------------------------------------------


def test_a_promise_runs_its_full_time_from_when_it_is_given() -> None:
    one = member()
    asked = {"kind": "promise_me", "round": 1, "asked_at": T - 3}
    assert one.promise(asked, 500.0) == promise(T - 3)
    assert one.promised_until == 500.0 + TTL_S
    one.promise(asked, 499.0)
    assert one.promised_until == 500.0 + TTL_S


def test_a_promise_is_for_one_round() -> None:
    one = member()
    assert one.promise({"kind": "promise_me", "round": 2, "asked_at": T}, 500.0) is None
    one.promise({"kind": "promise_me", "round": 1, "asked_at": T}, 500.0)
    one.enter(1, ())
    assert one.promised_until == 500.0 + TTL_S
    one.enter(2, ())
    assert one.promised_until == float("-inf")


# --- those who are vouched for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "until"),
    [
        (vouch(T, 4.0), T + 4.0),  # from when it was asked for, not from now
        (vouch(T, 400.0), T + TTL_S),  # nobody promises for longer
        (vouch(T + 119.0, 4.0), T + LIMIT_S),  # the limit counts from the lease's own end
        (vouch(T, 4.0, round=2), None),
        (vouch(T + 200.0, 4.0), None),  # asked for in the future
        ({**vouch(T, 4.0), "for_s": "long"}, None),
        (vouch(T, float("nan")), None),
    ],
)
def test_a_vouch_extends_the_deadline_so_far_and_no_farther(message: dict[str, Any], until: float | None) -> None:
    assert member().heard_vouch(message, T + 119.5, lease_deadline=T, limit_s=LIMIT_S) == until


def test_a_vouch_never_lasts_longer_than_the_promises_behind_it() -> None:
    """All clocks differ, and every message is late: the member's end of the vouch is not after any promise's."""
    rank0, one = first(), member()
    ask = one.ask(50.0)  # on the member's clock, which is 950 behind
    rank0.heard_wish("b", ask, T + 1)
    asked_at = T + 1
    answer = one.promise({"kind": "promise_me", "round": 1, "asked_at": asked_at}, 52.0)
    assert answer
    rank0.heard_promise("a", promise(asked_at), T + 2)
    rank0.heard_promise("c", promise(asked_at), T + 2)
    (sent,) = rank0.heard_promise("b", answer, T + 3)
    until = one.heard_vouch(sent.message, 54.0, lease_deadline=54.0, limit_s=LIMIT_S)
    assert until is not None
    assert until + 950 <= asked_at + TTL_S
