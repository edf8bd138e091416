"""Scripts under ``dlaunch --parallel fsdp``: with ours under torch's names they print what they print with torch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..programs import ROOT

SCRIPT = Path(__file__).with_name("fsdp_script.py")


def lines_of_ranks(folder: Path, *options: str) -> list[list[str]]:
    """What each rank printed, without the prefix."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DLAUNCH_")}
    command = [sys.executable, "-m", "dlaunch", "run", "--nproc-per-node", "2", *options, str(SCRIPT), str(folder)]
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=140, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = result.stdout.splitlines()
    return [[line.removeprefix(f"0:{rank} ") for line in lines if line.startswith(f"0:{rank} ")] for rank in range(2)]


def numbers_of(lines: list[str]) -> dict[str, Any]:
    """``what name number name number ...`` as ``{what: {name: number}}``; other lines as they are."""
    found: dict[str, Any] = {}
    for line in lines:
        what, *pairs = re.split(r" (?=[\w.]+ -?\d+\.\d+)", line)
        found[what] = {name: float(number) for name, number in (pair.split(" ") for pair in pairs)}
    return found


@pytest.mark.torch
@pytest.mark.timeout(300)  # two launches that train
def test_scripts_for_fsdp1_and_fsdp2_and_plain_ones_train_the_same_with_ours_as_with_torchs(tmp_path: Path) -> None:
    theirs, ours = lines_of_ranks(tmp_path / "torch"), lines_of_ranks(tmp_path / "ours", "--parallel", "fsdp")
    for rank in range(2):
        expected, found = numbers_of(theirs[rank]), numbers_of(ours[rank])
        assert expected.pop("ours: Net torch torch") == found.pop("ours: Net dlaunch dlaunch")
        goes_on, generic = found.pop("ours: fsdp1 goes on"), found.pop("ours: generic")
        assert list(found) == list(expected)
        for what, values in expected.items():
            assert found[what] == pytest.approx(values, abs=1e-5), what
        assert expected["fsdp1"] == pytest.approx(expected["fsdp2"], abs=1e-5)
        assert expected["from whole ones"] == pytest.approx(expected["from parts"], abs=1e-5)
        assert goes_on == generic == pytest.approx(expected["from parts"], abs=1e-5)
