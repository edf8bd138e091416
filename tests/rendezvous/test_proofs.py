"""Rule (3) of the proofs, each way and its negation: when a lease that is absent from a list proves a node gone."""

from __future__ import annotations

import pytest

from dlaunch.rendezvous.proofs import Proofs

TTL_S, LIMIT_S = 5.0, 120.0
NEVER = float("-inf")
T = 1000.0  # some time


class Lister:
    """One agent that makes lists of the members a, b and c of round 1."""

    def __init__(self, me: str | None) -> None:
        self.proofs = Proofs(TTL_S, LIMIT_S)
        self.proofs.enter(1)
        self._me = me

    def lists(
        self, registered: str, at: float, *, promised_until: float = NEVER, doubts_s: float = 0.0, took_s: float = 0.0
    ) -> str:
        """Who counts as gone after a list that was asked for at a time, and answered so much later."""
        self.proofs.listed(
            "abc",
            set(registered),
            me=self._me,
            asked_at=at,
            answered_at=at + took_s,
            promised_until=promised_until,
            doubts_s=dict.fromkeys("abc", doubts_s),
        )
        return "".join(sorted(self.proofs.fenced))


def test_a_present_lease_proves_nothing() -> None:
    assert Lister("a").lists("abc", T) == ""


# --- (a) a member lists, and has no promise running ------------------------------------------------------------------


def test_a_member_takes_an_absent_lease_for_a_proof() -> None:
    assert Lister("a").lists("ac", T) == "b"


def test_unless_it_has_promised_not_to() -> None:
    lister = Lister("a")
    assert lister.lists("ac", T, promised_until=T + 0.1) == ""
    assert lister.lists("ac", T + 0.1, promised_until=T + 0.1) == "b"


def test_nobody_proves_itself_gone() -> None:
    assert Lister("b").lists("ac", T) == ""


def test_a_lease_whose_end_is_in_doubt_has_to_stay_absent() -> None:
    lister = Lister("a")
    assert lister.lists("ac", T, doubts_s=6.0) == ""
    assert lister.lists("ac", T + 4, doubts_s=6.0) == ""
    assert lister.lists("ac", T + 6, doubts_s=6.0) == "b"


def test_it_is_absent_from_when_the_first_list_was_answered() -> None:
    lister = Lister("a")
    assert lister.lists("ac", T, doubts_s=6.0, took_s=1.0) == ""
    assert lister.lists("ac", T + 4, doubts_s=6.0) == ""
    assert lister.lists("ac", T + 6.9, doubts_s=6.0) == ""
    assert lister.lists("ac", T + 7, doubts_s=6.0) == "b"


# --- (b) a spare or a newcomer lists ---------------------------------------------------------------------------------


def test_a_spare_takes_an_absent_lease_for_nothing() -> None:
    lister = Lister(None)
    for seconds in range(0, 600, 2):
        assert lister.lists("ac", T + seconds) == ""


def test_but_for_a_proof_a_promise_long_after_another_member_ended() -> None:
    lister = Lister(None)
    lister.proofs.member_ended(T)
    assert lister.lists("ac", T + TTL_S - 0.1) == ""
    assert lister.lists("ac", T + TTL_S) == "b"


def test_the_first_end_that_was_known_counts() -> None:
    lister = Lister(None)
    lister.proofs.member_ended(T)
    lister.proofs.member_ended(T + 4)
    assert lister.lists("ac", T + TTL_S) == "b"


# --- (c) nobody is left ----------------------------------------------------------------------------------------------


def everybody_absent(lister: Lister, seconds: float, step_s: float = 2.0) -> str:
    """Lists without any of them, from T on for so long."""
    at = T
    while at < T + seconds:
        assert lister.lists("", at) == ""
        at += step_s
    return lister.lists("", T + seconds)


def test_where_all_are_absent_a_newcomer_waits_the_outage_limit_and_a_lease() -> None:
    assert everybody_absent(Lister(None), LIMIT_S + TTL_S) == "abc"


def test_not_while_one_is_registered() -> None:
    lister = Lister(None)
    for seconds in range(0, 300, 2):
        assert lister.lists("c", T + seconds) == ""


def test_one_that_comes_back_begins_the_wait_anew() -> None:
    lister = Lister(None)
    assert everybody_absent(lister, 100) == ""
    assert lister.lists("b", T + 102) == ""
    for seconds in range(104, 104 + 124, 2):
        assert "b" not in lister.lists("", T + seconds)
    assert "b" in lister.lists("", T + 104 + LIMIT_S + TTL_S)


@pytest.mark.parametrize("gap_s", [TTL_S, 60.0])
def test_a_gap_between_two_lists_begins_the_wait_anew(gap_s: float) -> None:
    lister = Lister(None)
    everybody_absent(lister, 100)
    began = T + 100 + gap_s
    seconds = 0.0
    while seconds < LIMIT_S + TTL_S:
        assert lister.lists("", began + seconds) == ""
        seconds += 2.0
    assert lister.lists("", began + LIMIT_S + TTL_S) == "abc"


# --- proofs stay true ------------------------------------------------------------------------------------------------


def test_what_was_proved_stays_proved() -> None:
    lister = Lister("a")
    lister.lists("ac", T)
    assert lister.lists("abc", T + 1, promised_until=T + 9) == "b"


def test_in_another_round_it_means_nothing() -> None:
    lister = Lister("a")
    lister.lists("ac", T)
    lister.proofs.enter(1)
    assert lister.proofs.fenced == {"b"}
    lister.proofs.enter(2)
    assert lister.proofs.fenced == set()
    assert lister.lists("abc", T + 1) == ""
