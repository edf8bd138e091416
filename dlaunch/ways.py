"""How a script is made parallel: the value of ``--parallel``, which workers find in DLAUNCH_PARALLEL."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from dlaunch.errors import UsageError

VARIABLE = "DLAUNCH_PARALLEL"


class Way(Enum):
    """What ``prepare`` puts a model into."""

    NONE = "none"  # nothing: the script does it, or runs alone
    DP = "dp"  # one process, several devices
    DDP = "ddp"  # one process for each device
    FSDP = "fsdp"  # one process for each device, and each holds a part of the parameters


def way_named(text: str) -> Way:
    """The way of that name; raises UsageError for another one."""
    try:
        return Way(text)
    except ValueError:
        raise UsageError(f"--parallel is {text!r}.", "Give dp, ddp, fsdp or none.") from None


def way_for(given: str | None, environment: Mapping[str, str]) -> Way:
    """What ``prepare`` does: as its argument says, else the variable, else DDP under a launcher and nothing without.

    Raises:
        UsageError: an unknown way, or DataParallel in a world of several processes.
    """
    text = given if given is not None else environment.get(VARIABLE)
    launched = "RANK" in environment and "WORLD_SIZE" in environment
    way = way_named(text) if text is not None else Way.DDP
    if launched:
        check_way_for(way, int(environment["WORLD_SIZE"]))
    return Way.NONE if way in {Way.DDP, Way.FSDP} and not launched else way


def check_way_for(way: Way | None, world_size: int) -> None:
    """Raise UsageError for DataParallel in a world of several processes."""
    if way is Way.DP and world_size > 1:
        raise UsageError(
            f"--parallel dp is for one process, and there are {world_size}.",
            "Start one with --nproc-per-node 1, or give --parallel ddp.",
        )
