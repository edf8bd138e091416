"""Which device belongs to a process, and what is missing to form a group."""

from __future__ import annotations

import pytest
import torch

from dlaunch.errors import UsageError
from dlaunch.parallel.scripts.process_group import device_of, join_process_group


@pytest.mark.parametrize(
    ("accelerator", "count", "environment", "device"),
    [
        (None, 0, {"LOCAL_RANK": "3"}, "cpu"),
        ("cuda", 0, {}, "cpu"),
        ("cuda", 8, {}, "cuda:0"),
        ("cuda", 8, {"LOCAL_RANK": "7"}, "cuda:7"),
        ("xpu", 2, {"LOCAL_RANK": "1", "RANK": "5"}, "xpu:1"),
    ],
)
def test_a_process_has_the_accelerator_of_its_local_rank(
    accelerator: str | None, count: int, environment: dict[str, str], device: str
) -> None:
    assert device_of(accelerator, count, environment) == torch.device(device)


def test_more_processes_than_accelerators_are_refused() -> None:
    with pytest.raises(UsageError, match="local rank 2 has no cuda device: this machine has 2"):
        device_of("cuda", 2, {"LOCAL_RANK": "2"})


def test_without_the_launchers_variables_the_missing_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"^WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"):
        join_process_group(torch.device("cpu"))
