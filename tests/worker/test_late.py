"""Which variables come too late for a torch that is there already: a pure function."""

from __future__ import annotations

import pytest

from dlaunch.worker.late import late_variables


@pytest.mark.parametrize(
    ("before", "after", "late"),
    [
        ({}, {"OMP_NUM_THREADS": "4"}, ["OMP_NUM_THREADS"]),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}, ["OMP_NUM_THREADS"]),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}, []),
        ({"OMP_NUM_THREADS": "4"}, {}, []),
        ({}, {"TORCHDYNAMO_VERBOSE": "1", "TORCH_LOGS": "+dynamo"}, ["TORCHDYNAMO_VERBOSE", "TORCH_LOGS"]),
        ({}, {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}, []),
        ({}, {"TORCHINDUCTOR_CACHE_DIR": "/tmp/x"}, []),
        ({}, {'OMP_"quoted"': "1", "OMP_\udcff": "1"}, []),
        ({}, {"PATH": "/bin", "MY_OMP_NUM_THREADS": "1"}, []),
    ],
)
def test_only_what_is_read_at_import_and_was_changed_comes_too_late(
    before: dict[str, str], after: dict[str, str], late: list[str]
) -> None:
    assert late_variables(before, after) == late
