"""Following a peer, as a pure machine: what proves that it is gone, and when it is tried again."""

from __future__ import annotations

import pytest

from dlaunch.agent.peer_connection import How
from dlaunch.agent.peer_follow import FIRST_DELAY_S, LAST_DELAY_S, Follow
from dlaunch.rendezvous.values import Peer

PEER = Peer("anna", "10.0.0.1:5000")


def established(at: float = 100.0) -> Follow:
    follow = Follow(PEER, at)
    follow.trying()
    assert follow.opened("anna")
    return follow


def test_a_connection_that_ended_and_then_a_refusal_prove_that_the_peer_is_gone() -> None:
    follow = established()
    follow.ended(How.CLOSED, was_open=True, at=200.0)
    assert (follow.gone, follow.try_at) == (False, 200.0)  # tried again at once
    follow.trying()
    follow.ended(How.REFUSED, was_open=False, at=200.1)
    assert (follow.gone, follow.try_at) == (True, None)


def test_another_node_at_the_address_proves_it_too() -> None:
    follow = established()
    follow.ended(How.CLOSED, was_open=True, at=200.0)
    follow.trying()
    assert not follow.opened("bert")
    assert follow.gone


def test_what_waits_in_the_guards_backlog_and_is_reset_is_tried_again_at_once() -> None:
    follow = established()
    follow.ended(How.CLOSED, was_open=True, at=200.0)
    follow.trying()
    follow.ended(How.CLOSED, was_open=False, at=203.0)
    assert (follow.gone, follow.try_at) == (False, 203.0)
    follow.trying()
    follow.ended(How.REFUSED, was_open=False, at=203.0)
    assert follow.gone


@pytest.mark.parametrize("how", [How.CLOSED, How.SILENT, How.STRANGE, How.DROPPED])
def test_nothing_else_proves_anything_however_often_it_happens(how: How) -> None:
    follow = established()
    follow.ended(how, was_open=True, at=200.0)
    for attempt in range(100):
        follow.trying()
        follow.ended(how, was_open=False, at=201.0 + attempt)
    assert not follow.gone


@pytest.mark.parametrize("how", [How.REFUSED, How.CLOSED])
def test_an_address_that_was_never_known_to_lead_to_the_peer_proves_nothing(how: How) -> None:
    follow = Follow(PEER, 100.0)
    follow.trying()
    follow.ended(how, was_open=False, at=100.0)
    follow.trying()
    assert not follow.opened("bert")
    assert not follow.gone
    follow.ended(How.STRANGE, was_open=False, at=101.0)
    assert follow.try_at is not None


def test_the_delay_between_attempts_grows_to_a_bound_and_starts_anew() -> None:
    follow = established()
    follow.ended(How.CLOSED, was_open=True, at=200.0)
    delays = []
    for _ in range(5):
        follow.trying()
        follow.ended(How.SILENT, was_open=False, at=300.0)
        assert follow.try_at is not None
        delays.append(follow.try_at - 300.0)
    assert delays == pytest.approx([FIRST_DELAY_S, 0.4, 0.8, LAST_DELAY_S, LAST_DELAY_S])
    follow.trying()
    assert follow.opened("anna")
    follow.ended(How.CLOSED, was_open=True, at=400.0)
    follow.trying()
    follow.ended(How.SILENT, was_open=False, at=400.0)
    assert follow.try_at == pytest.approx(400.0 + FIRST_DELAY_S)


def test_a_peer_that_accepts_and_ends_again_and_again_is_not_tried_in_a_hot_loop() -> None:
    follow = established()
    for _ in range(3):
        follow.ended(How.CLOSED, was_open=True, at=200.0)
        follow.trying()
        assert follow.opened("anna")
    follow.ended(How.CLOSED, was_open=True, at=200.0)
    assert follow.try_at is not None
    assert follow.try_at > 200.0
    for attempt in range(2):
        follow.trying()
        follow.ended(How.CLOSED, was_open=False, at=300.0 + attempt)
    assert follow.try_at > 301.0
