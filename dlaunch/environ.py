"""The variables that a worker sees: torchrun's contract, in one pure function; and the one that none may see.

Source: torch 2.13 ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` for names and meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .ways import VARIABLE as PARALLEL
from .ways import Way

PASSWORD_VARIABLE = "DLAUNCH_RDZV_PASSWORD"  # for the launcher alone, which takes it out of its environment


class Place(NamedTuple):
    """One worker's place in the world of a round."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role: str = "default"
    role_rank: int = 0
    role_world_size: int = 1


class World(NamedTuple):
    """A node's share in the world of a round: which ranks its workers have, and how many there are on all nodes."""

    group_rank: int
    group_world_size: int
    base_rank: int  # the rank of local rank 0
    world_size: int
    role_base_rank: int  # the same among the workers of one role
    role_world_size: int

    @classmethod
    def alone(cls, local_world_size: int) -> World:
        """The world of a job on one node."""
        return cls(0, 1, 0, local_world_size, 0, local_world_size)

    def place(self, local_rank: int, local_world_size: int, role: str) -> Place:
        """Where one of this node's workers stands."""
        return Place(
            rank=self.base_rank + local_rank,
            local_rank=local_rank,
            world_size=self.world_size,
            local_world_size=local_world_size,
            group_rank=self.group_rank,
            group_world_size=self.group_world_size,
            role=role,
            role_rank=self.role_base_rank + local_rank,
            role_world_size=self.role_world_size,
        )


class Meeting(NamedTuple):
    """Where the workers of a round meet (their TCPStore)."""

    address: str
    port: int
    served_by_agent: bool  # else rank 0 serves it


def worker_environment(
    place: Place,
    meeting: Meeting,
    *,
    run_id: str,
    restart_count: int,
    max_restarts: int,
    error_file: str,
    signals: str,
    inherited: Mapping[str, str],
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """What is set for a worker on top of the environment that it inherits."""
    local_rank = 0 if virtual_local_rank else place.local_rank
    variables = {
        "RANK": place.rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.group_rank,
        "GROUP_WORLD_SIZE": place.group_world_size,
        "ROLE_NAME": place.role,
        "ROLE_RANK": place.role_rank,
        "ROLE_WORLD_SIZE": place.role_world_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RESTART_COUNT": restart_count,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": meeting.served_by_agent,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": signals,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if virtual_local_rank and (visible := inherited.get("CUDA_VISIBLE_DEVICES", "")):
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place.local_rank]
    return {name: str(value) for name, value in variables.items()}


def alike(local_world_size: int, parallel: Way | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """What is the same for all workers of a node: set for their starter, because libraries read it at their import."""
    variables = {}
    if "OMP_NUM_THREADS" not in inherited and local_world_size > 1:
        variables["OMP_NUM_THREADS"] = "1"
    if parallel is not None:
        variables[PARALLEL] = parallel.value
    return variables
