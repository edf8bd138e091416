"""The keys of a run, and which of what stands among the registrations can be ours."""

from __future__ import annotations

import pytest

from dlaunch.rendezvous.keys import Keys, is_node_id, new_node_id

KEYS = Keys.of("/dlaunch", "a/b")


@pytest.mark.parametrize("arrival", [0, 1, 0xFFFFFFFFFFFF])
def test_a_new_id_is_known_for_one_and_stands_among_the_registrations(arrival: int) -> None:
    node_id = new_node_id(arrival, "5f")
    first, beyond = KEYS.oldest_nodes
    assert is_node_id(node_id)
    assert first <= KEYS.node(node_id) < beyond
    assert KEYS.node_of(KEYS.node(node_id)) == node_id


def test_ids_stand_in_the_order_of_arrival() -> None:
    ids = [new_node_id(arrival, "x") for arrival in (0, 9, 10, 255, 256, 1 << 40)]
    assert ids == sorted(ids)


@pytest.mark.parametrize("text", ["", "!x", "zz", "0", "000000000001", "000000000001-", "00000000000G-1", "1-2"])
def test_what_somebody_else_puts_there_is_no_id(text: str) -> None:
    assert not is_node_id(text)
