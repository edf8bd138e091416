"""Which unit is gathered and freed when: pure functions of the order in which units ran.

A unit is a number. ``seen`` is the order of one whole forward, with repetitions; ``done`` how far the present one has
come. One unit is gathered ahead of its use, in both directions, so that at most two are in flight or whole beside
those that are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One unit's turn."""

    unit: int
    gathers: tuple[int, ...]  # begun before the unit computes; what it needs itself comes first
    frees: tuple[int, ...]  # after it has computed


def next_in_forward(seen: Sequence[int], done: Sequence[int]) -> int | None:
    """The unit to gather ahead; none if the present forward has left the path of the last one, or is at its end."""
    place = len(done)
    if place >= len(seen) or seen[place - 1] != done[-1]:
        return None
    return seen[place]


def is_last(seen: Sequence[int], done: Sequence[int]) -> bool:
    """Whether no unit comes after the present one: it stays whole, for it is the first of the backward."""
    return len(done) == len(seen) and seen[-1] == done[-1]


def next_in_backward(first_uses: Sequence[int], unit: int, finished: Collection[int]) -> int | None:
    """The unit whose backward comes after this one's.

    Args:
        first_uses: units in the order in which forwards first used them.
        unit: whose backward begins.
        finished: units whose gradients are on their way.
    """
    if unit not in first_uses:
        return None
    before = first_uses[: first_uses.index(unit)]
    return next((other for other in reversed(before) if other not in finished), None)


def forward_plan(seen: Sequence[int], kept: Collection[int]) -> list[Step]:
    """The whole forward as a picture: what happens when it runs as the last one did, one unit inside none.

    Args:
        seen: order of units.
        kept: units that stay whole after their forward.
    """
    plan: list[Step] = []
    whole: set[int] = set()
    for place, unit in enumerate(seen):
        done = seen[: place + 1]
        ahead = next_in_forward(seen, done)
        gathers = tuple(dict.fromkeys(u for u in (unit, ahead) if u is not None and u not in whole))
        whole.update(gathers)
        frees = () if unit in kept or is_last(seen, done) or ahead == unit else (unit,)
        whole.difference_update(frees)
        plan.append(Step(unit, gathers, frees))
    return plan


def backward_plan(first_uses: Sequence[int], whole: Collection[int]) -> list[Step]:
    """The whole backward as a picture.

    Args:
        first_uses: units in the order in which the forward first used them.
        whole: units that are whole when the backward begins.
    """
    plan: list[Step] = []
    present, finished = set(whole), set[int]()
    for unit in reversed(first_uses):
        ahead = next_in_backward(first_uses, unit, finished)
        gathers = tuple(u for u in (unit, ahead) if u is not None and u not in present)
        present.update(gathers)
        finished.add(unit)
        present.discard(unit)
        plan.append(Step(unit, gathers, (unit,)))
    return plan
