"""The worker's variables, against what torch itself reads and sets."""

from __future__ import annotations

import pytest

from dlaunch.environ import Meeting, Place, alike, worker_environment
from dlaunch.ways import Way


def environment(inherited: dict[str, str] | None = None, **changes: object) -> dict[str, str]:
    place = Place(rank=3, local_rank=1, world_size=4, local_world_size=2, group_rank=1, group_world_size=2)
    settings: dict[str, object] = {
        "run_id": "exp7",
        "restart_count": 2,
        "max_restarts": 5,
        "error_file": "/logs/error.json",
        "signals": "SIGTERM",
        "inherited": inherited or {},
        **changes,
    }
    return worker_environment(place, Meeting("127.0.0.1", 4711, served_by_agent=True), **settings)  # type: ignore[arg-type]


def test_every_variable_of_the_contract_is_set() -> None:
    assert environment() == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "exp7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_what_the_user_set_is_kept() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert environment({name: "3"})[name] == "3"


@pytest.mark.parametrize(
    ("local_world_size", "inherited", "expected"),
    [(1, {}, {}), (2, {}, {"OMP_NUM_THREADS": "1"}), (2, {"OMP_NUM_THREADS": "8"}, {})],
    ids=["one worker has all cores", "several share them", "the user knows better"],
)
def test_several_workers_get_one_thread_each(
    local_world_size: int, inherited: dict[str, str], expected: dict[str, str]
) -> None:
    assert alike(local_world_size, None, inherited) == expected


def test_the_way_reaches_the_workers_as_the_variable_that_prepare_reads() -> None:
    assert alike(1, Way.DDP, {}) == {"DLAUNCH_PARALLEL": "ddp"}


def test_virtual_local_ranks_see_one_device_as_their_first() -> None:
    found = environment({"CUDA_VISIBLE_DEVICES": "4,5"}, virtual_local_rank=True)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "5")
