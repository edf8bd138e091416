"""A dozen scenarios of `make chaos`: one for each way in which a run could leave something behind or end wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent.parent / "benchmarks" / "chaos.py"

# The second column is what the seed stands for, so that a seed cannot come to mean something else unnoticed.
SCENARIOS = [
    (2565, "SIGKILL to a worker (rank 1), running [warm-bare, 2 x grandchildren, restarts 1, grace 1.0]"),
    (785, "SIGKILL to all workers, running [exec, 1 x child, restarts 0, grace 0.5]"),
    (26, "SIGKILL to the agent, running [warm-bare, 2 x daemon, restarts 0, grace 0.5]"),
    (90, "SIGKILL to agent and starter at once, running [warm-bare, 1 x daemon, restarts 1, grace 2.5]"),
    (532, "SIGKILL to agent and starter at once, running [exec, 2 x grandchildren, restarts 1, grace 2.5]"),
    (2807, "SIGKILL to the starter, running [warm-bare, 1 x daemon, restarts 1, grace 0.5]"),
    (270, "SIGKILL to the guard, running [exec, 2 x daemon, restarts 1, grace 0.5]"),
    (
        2375,
        "SIGHUP to the agent, stopping after rank 0 exits with 7 [warm-bare, 2 x stops-slowly, restarts 2, grace 2.5]",
    ),
    (
        38,
        "SIGABRT to a worker (rank 2), restarting after rank 0 exits with 7 [exec, 3 x prints, restarts 2, grace 1.0]",
    ),
    (218, "SIGKILL to the starter, restarting after rank 0 exits with 7 [exec, 2 x daemon, restarts 1, grace 1.0]"),
    (692, "SIGKILL to the starter, preparing [warm-bare, 2 x grandchildren, restarts 1, grace 1.0]"),
    (450, "SIGSTOP to a worker (rank 0) for ever, running [warm-bare, 3 x ignores-term, restarts 2, grace 0.5]"),
    (142, "SIGINT to the agent, twice, running [exec, 3 x ignores-term, restarts 1, grace 60.0]"),
]


@pytest.mark.parametrize(("seed", "scenario"), SCENARIOS)
def test_a_run_ends_as_documented_and_leaves_nothing_after(seed: int, scenario: str) -> None:
    command = [sys.executable, str(CHAOS), "--seed", str(seed), "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert scenario in done.stdout
