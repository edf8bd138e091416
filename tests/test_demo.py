"""The demo that the README promises shows what it promises: a killed worker, a job that goes on, a trained network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def run_demo(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(DEMO), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def test_the_demo_kills_a_worker_and_the_training_still_reaches_its_accuracy(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--epochs", "4", "--kill-after", "1", "--target-accuracy", "0.8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "the job goes on from its checkpoint" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["restarts_used"] == 1
    assert summary["attempts"][0]["root_cause"]["signal"] == "SIGKILL"
    assert summary["attempts"][0]["root_cause"]["rank"] == 1


def test_the_demo_fails_when_the_accuracy_is_missed(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--no-chaos", "--epochs", "1", "--target-accuracy", "0.999")
    assert done.returncode != 0
    assert "kill -9" not in done.stdout
    assert "not 0.999 or better" in done.stdout
