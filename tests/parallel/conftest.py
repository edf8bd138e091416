"""Worlds of real processes, one for each size, shared by all tests of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # `tests.parallel.worlds`, here and in the ranks

from tests.parallel.worlds import World, WorldOf


@pytest.fixture(scope="session")
def world_of() -> Iterator[WorldOf]:
    """``world_of(2)``: two ranks in a gloo process group; a world that broke is replaced by a new one."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in worlds or not worlds[size].is_open:
            worlds[size] = World(size)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()
