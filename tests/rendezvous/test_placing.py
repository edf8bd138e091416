"""Ranks: contiguous on a node, every one once, in the order of wishes and arrivals."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dlaunch.rendezvous.placing import as_assignment, assign, in_rank_order
from dlaunch.rendezvous.records import NodeRecord

from .sights import node, ready

WISHES = st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=8)
SIZES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["trainer", "reader"])), min_size=1, max_size=8)


def ordered(*wishes: int | None) -> str:
    nodes = [node(name, node_rank=wish) for name, wish in zip("abcdefgh", wishes, strict=False)]
    return "".join(each.node_id for each in in_rank_order(nodes))


def test_without_wishes_the_order_is_that_of_arrival() -> None:
    assert ordered(None, None, None) == "abc"


def test_a_wish_is_granted_where_the_place_is_free() -> None:
    assert ordered(2, None, None) == "bca"
    assert ordered(1, 0, None) == "bac"
    assert ordered(1, 1, None) == "bac"  # the older one has it
    assert ordered(7, None, 0) == "cab"  # there is no such place


@settings(max_examples=40, deadline=None)
@given(WISHES)
def test_every_node_has_one_place_and_a_free_wish_is_granted(wishes: list[int | None]) -> None:
    nodes = [node(name, node_rank=wish) for name, wish in zip("abcdefgh", wishes, strict=False)]
    order = in_rank_order(nodes)
    assert sorted(each.node_id for each in order) == [each.node_id for each in nodes]
    assert order == in_rank_order(reversed(nodes))
    for place, each in enumerate(order):
        first = next((other for other in nodes if other.node_rank == place), None)
        assert first is None or each == first


def placed(sizes: list[tuple[int, str]]) -> list[NodeRecord]:
    return [node(name, local_world_size=size, role=role) for name, (size, role) in zip("abcdefgh", sizes, strict=False)]


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_ranks_are_contiguous_on_a_node_and_every_one_is_there_once(sizes: list[tuple[int, str]]) -> None:
    nodes = placed(sizes)
    assigned = assign(nodes, {each.node_id: ready(each.node_id) for each in nodes})
    ranks = [rank for one in assigned for rank in range(one.base_rank, one.base_rank + one.local_world_size)]
    assert ranks == list(range(sum(size for size, _ in sizes)))
    assert {one.world_size for one in assigned} == {len(ranks)}
    assert [one.group_rank for one in assigned] == list(range(len(nodes)))
    for role in {role for _, role in sizes}:
        of_role = [one for one, each in zip(assigned, nodes, strict=True) if each.role == role]
        in_role = [
            rank for one in of_role for rank in range(one.role_base_rank, one.role_base_rank + one.local_world_size)
        ]
        assert in_role == list(range(len(in_role)))
        assert {one.role_world_size for one in of_role} == {len(in_role)}


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_each_follows_the_next_and_all_meet_at_the_first(sizes: list[tuple[int, str]]) -> None:
    nodes = placed(sizes)
    reports = {each.node_id: ready(each.node_id, port) for port, each in enumerate(nodes, 29500)}
    assigned = assign(nodes, reports)
    for i, one in enumerate(assigned):
        after = nodes[(i + 1) % len(nodes)]
        assert one.successor == ((after.node_id, after.address) if len(nodes) > 1 else None)
        assert one.first == (nodes[0].node_id, nodes[0].address)
        assert (one.meeting_address, one.meeting_port) == ("host-a", 29500)
        assert [peer.node_id for peer in one.members] == ([each.node_id for each in nodes] if i == 0 else [])


def test_what_a_node_is_told_is_what_was_assigned() -> None:
    one = assign([node("a"), node("b")], {"a": ready("a")})[1]
    told = as_assignment(one, 7, 2)
    assert (told.round, told.restart_count) == (7, 2)
    assert all(getattr(told, name) == getattr(one, name) for name in set(told._fields) & set(one._fields))
