"""What --parallel means, as a table."""

from __future__ import annotations

import pytest

from dlaunch.errors import UsageError
from dlaunch.ways import Way, way_for, way_named

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("given", "environment", "way"),
    [
        (None, {}, Way.NONE),
        (None, TWO, Way.DDP),
        (None, ALONE, Way.DDP),  # a job that shrank to one rank keeps what it is
        (None, {**TWO, "DLAUNCH_PARALLEL": "ddp"}, Way.DDP),
        (None, {**TWO, "DLAUNCH_PARALLEL": "none"}, Way.NONE),
        (None, {**ALONE, "DLAUNCH_PARALLEL": "dp"}, Way.DP),
        (None, {"DLAUNCH_PARALLEL": "ddp"}, Way.NONE),  # no launcher, no processes
        ("none", {**TWO, "DLAUNCH_PARALLEL": "ddp"}, Way.NONE),
        ("ddp", {}, Way.NONE),
        ("dp", {}, Way.DP),
        ("fsdp", {}, Way.NONE),
        ("fsdp", TWO, Way.FSDP),
        (None, {**TWO, "DLAUNCH_PARALLEL": "fsdp"}, Way.FSDP),
    ],
)
def test_the_argument_counts_before_the_variable_and_the_variable_before_the_launcher(
    given: str | None, environment: dict[str, str], way: Way
) -> None:
    assert way_for(given, environment) is way


def test_an_unknown_way_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--parallel is 'zero'\. Give dp, ddp, fsdp or none\."):
        way_named("zero")


def test_data_parallel_in_a_world_of_two_is_refused() -> None:
    with pytest.raises(UsageError, match="is for one process, and there are 2"):
        way_for("dp", TWO)
