"""Which step is taken when ranks hold different ones: a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from dlaunch.parallel.fsdp.generations import Holding, newest_whole

Held = Mapping[int, tuple[int, Sequence[int]]]


def holding(held: Sequence[Held]) -> list[dict[int, Holding]]:
    return [{step: Holding(*what) for step, what in steps.items()} for steps in held]


@pytest.mark.parametrize(
    ("held", "step", "owners"),
    [
        pytest.param([{5: (2, [0])}, {5: (2, [1])}], 5, {0: 0, 1: 1}, id="nobody is lost"),
        pytest.param([{}, {5: (1, [0])}], 5, {0: 1}, id="a rank joins"),
        pytest.param([{2: (2, [0, 1]), 4: (2, [0, 1])}], 4, {0: 0, 1: 0}, id="one of two is left"),
        pytest.param(
            [{2: (3, [0, 2]), 4: (3, [0])}, {2: (3, [1, 0]), 4: (3, [1, 0])}],
            2,
            {0: 0, 1: 1, 2: 0},
            id="the lost one had not sent its rows of the last refresh",
        ),
        pytest.param(
            [{2: (3, [0, 2])}, {2: (3, [1, 0]), 4: (3, [1, 0])}],
            2,
            {0: 0, 1: 1, 2: 0},
            id="a rank had not begun the last refresh",
        ),
        pytest.param(
            [{4: (3, [0, 2]), 2: (3, [0])}, {4: (3, [1])}], 4, {0: 0, 1: 1, 2: 0}, id="each has what the other lacks"
        ),
        pytest.param(
            [{6: (2, [0])}, {5: (2, [1])}, {5: (2, [0])}],
            5,
            {0: 2, 1: 1},
            id="hybrid: one rank made a step that the others did not",
        ),
    ],
)
def test_the_newest_step_of_which_all_rows_are_there(held: Sequence[Held], step: int, owners: dict[int, int]) -> None:
    chosen = newest_whole(holding(held))
    assert (chosen.step, chosen.owners) == (step, owners)
    assert step in held[chosen.speaker]
    assert all(old in held[rank][step][1] for old, rank in owners.items())


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([{}, {}], "No rank that remains holds a state"),
        ([{5: (3, [0])}, {5: (3, [1])}], "The rows of rank 2 of the old world are lost"),
        ([{2: (4, [0, 3])}, {2: (4, [3])}], "The rows of rank 1, 2 of the old world are lost"),
        (
            [{6: (2, [0])}, {5: (2, [1])}],
            "no step of which all rows are left: rank 0 holds step 6, rank 1 holds step 5",
        ),
    ],
)
def test_it_says_why_there_is_none(held: Sequence[Held], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        newest_whole(holding(held))
