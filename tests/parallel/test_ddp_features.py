"""Features alone and in pairs: the training of the naive class, bit for bit with two ranks, and of one process.

A seeded sample in short runs. All pairs in all worlds, fifty steps each: benchmarks/parallel_ddp_matrix.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from .ddp_matrix import ALONE, FEATURES, PAIRS, Case, check_all, compatible, distance
from .worlds import WorldOf

STEPS = 3


def sampled(cases: list[Case], count: int, seed: int) -> list[Case]:
    return random.Random(seed).sample(cases, count)


@pytest.mark.parametrize(
    ("size", "cases", "transport"),
    [
        (1, sampled(ALONE, 6, seed=1), "torch"),
        (2, ALONE, "torch"),
        (2, sampled(PAIRS, 12, seed=2), "shared_memory"),
        (2, sampled(PAIRS, 24, seed=3), "torch"),
        (3, sampled([*ALONE, *PAIRS], 10, seed=4), "shared_memory"),
        (4, sampled([*ALONE, *PAIRS], 4, seed=5), "torch"),
        (5, sampled([*ALONE, *PAIRS], 4, seed=6), "shared_memory"),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else str(value),
)
def test_features_train_as_the_naive_class_and_one_process_do(
    world_of: WorldOf, size: int, cases: list[Case], transport: str
) -> None:
    for outcome in world_of(size).run(check_all, size, [(case, transport) for case in cases], STEPS):
        assert outcome.failures == []
        assert outcome.cases == len(cases)


def test_the_matrix_holds_every_feature_alone_and_every_pair_that_can_be() -> None:
    possible = {
        frozenset((first.name, second.name))
        for first in FEATURES
        for second in FEATURES
        if first is not second and compatible(first, second)
    }
    assert {frozenset(pair) for pair in PAIRS} == possible
    assert {name for case in ALONE for name in case} == {feature.name for feature in FEATURES}


def test_a_comparison_sees_one_unit_in_the_last_place_and_what_is_not_a_number() -> None:
    tensor = torch.tensor([1.0, 0.5])
    assert distance(tensor, tensor.clone()) == 0
    assert distance(torch.nextafter(tensor, torch.tensor(2.0)), tensor) > 0
    assert distance(torch.full((2,), torch.nan), tensor) == float("inf")
