"""The schedule as a picture: who is gathered before and freed after each unit's turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlaunch.parallel.fsdp.schedule import (
    Step,
    backward_plan,
    forward_plan,
    is_last,
    next_in_backward,
    next_in_forward,
)


def test_a_forward_gathers_one_ahead_and_keeps_the_last() -> None:
    assert forward_plan([3, 0, 1, 2], kept={3}) == [
        Step(3, gathers=(3, 0), frees=()),
        Step(0, gathers=(1,), frees=(0,)),
        Step(1, gathers=(2,), frees=(1,)),
        Step(2, gathers=(), frees=()),
    ]


def test_a_backward_begins_with_what_is_whole_and_gathers_one_ahead() -> None:
    assert backward_plan([3, 0, 1, 2], whole={3, 2}) == [
        Step(2, gathers=(1,), frees=(2,)),
        Step(1, gathers=(0,), frees=(1,)),
        Step(0, gathers=(), frees=(0,)),
        Step(3, gathers=(), frees=(3,)),
    ]


def test_a_unit_that_runs_twice_in_a_row_is_gathered_once() -> None:
    assert forward_plan([0, 0, 1], kept=()) == [
        Step(0, gathers=(0,), frees=()),
        Step(0, gathers=(1,), frees=(0,)),
        Step(1, gathers=(), frees=()),
    ]


def test_nothing_is_gathered_ahead_off_the_path_of_the_last_forward() -> None:
    assert next_in_forward([0, 1, 2], [0, 2]) is None
    assert next_in_forward([], [0]) is None
    assert next_in_forward([0, 1], [0, 1]) is None
    assert next_in_forward([0, 1], [0]) == 1
    assert is_last([0, 1], [0, 1])
    assert not is_last([0, 1], [0])
    assert not is_last([], [0])


def test_a_backward_skips_units_whose_gradients_are_on_their_way() -> None:
    assert next_in_backward([0, 1, 2], 2, finished={1}) == 0
    assert next_in_backward([0, 1, 2], 0, finished=set()) is None
    assert next_in_backward([0, 1], 7, finished=set()) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_whatever_the_order_a_unit_is_whole_on_its_turn_and_at_most_two_are_beside_the_last(order: list[int]) -> None:
    whole: set[int] = set()
    for step in forward_plan(order, kept=()):
        whole |= set(step.gathers)
        assert step.unit in whole
        assert len(whole) <= 2
        whole -= set(step.frees)
    first_uses = list(dict.fromkeys(order))
    for step in backward_plan(first_uses, whole & {first_uses[-1]}):
        whole |= set(step.gathers)
        assert step.unit in whole
        whole -= set(step.frees)
