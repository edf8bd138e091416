"""Which transport is taken, also for a group that was made without naming a backend, as torch recommends."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from dlaunch.parallel.transport.base import is_gloo_on_cpus
from dlaunch.parallel.transport.choice import choose_transport

from .worlds import World, WorldOf

CPU = {torch.device("cpu")}


def chosen(_: int) -> list[str]:
    assert dist.group.WORLD is not None
    return [choose_transport(wish, dist.group.WORLD, CPU).name for wish in ("auto", "torch", "shared_memory")]


def test_ranks_of_one_host_share_memory_unless_told_otherwise(world_of: WorldOf) -> None:
    assert world_of(2).run(chosen) == [["shared_memory", "torch", "shared_memory"]] * 2
    assert world_of(1).run(chosen) == [["torch", "torch", "shared_memory"]]


def chosen_in_a_group_without_a_name(rank: int, store: str) -> tuple[str, bool, list[str]]:
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    assert dist.group.WORLD is not None
    return dist.get_backend(), is_gloo_on_cpus(dist.group.WORLD), chosen(rank)


def test_a_group_made_without_naming_a_backend_shares_memory_too(tmp_path: Path) -> None:
    world = World(2)  # of its own: its group is replaced
    try:
        for backend, is_gloo, names in world.run(chosen_in_a_group_without_a_name, f"{tmp_path}/store"):
            assert backend in ("undefined", "gloo")  # torch 2.13 says the first: its name does not tell
            assert is_gloo and names == ["shared_memory", "torch", "shared_memory"]
    finally:
        world.close()
