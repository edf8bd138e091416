"""The real command, from the shell's point of view."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "summary.schema.json").read_text())
DEADLINE_S = 100.0


def environment(**more: str) -> dict[str, str]:
    ours = ("PET_", "DLAUNCH_", "TORCHELASTIC_", "NO_COLOR", "FORCE_COLOR", "CLICOLOR")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, **more}


def dlaunch(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dlaunch", "--log-dir", "logs", *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def summary(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "out.json").read_text())
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    return document


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_the_arguments_of_the_script_do_not_reach_it(tmp_path: Path) -> None:
    arguments = ["--log", "x", "-t", "3", "--help", "--", "--nnodes", "${local_rank}"]
    train = script(tmp_path, "import sys; print(*sys.argv[1:])")
    done = dlaunch(tmp_path, "--start-method", "exec", train, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("--log x -t 3 --help -- --nnodes 0")


def test_the_local_rank_is_not_handed_over(tmp_path: Path) -> None:
    train = script(tmp_path, "import sys; print(sys.argv[1:])")
    done = dlaunch(tmp_path, "--start-method", "exec", "--no-use-env", train, "a")
    assert done.returncode == 0, done.stderr
    assert "['--local-rank=0', 'a']" in done.stdout


def test_a_success_says_something(tmp_path: Path) -> None:
    done = dlaunch(tmp_path, "--no-python", "--summary-json", "out.json", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert summary(tmp_path)["state"] == "succeeded"


def test_settings_of_the_environment_do_not_count(tmp_path: Path) -> None:
    variables = {"PET_NPROC_PER_NODE": "2", "PET_NO_PYTHON": "true", "DLAUNCH_SUMMARY_JSON": "out.json"}
    done = dlaunch(tmp_path, "true", **variables)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["world_size"] == 2


def test_a_failure_is_not_reported_last(tmp_path: Path) -> None:
    train = script(tmp_path, "def step():\n    raise ValueError('bad\\x1b[31m batch')\n\nprint('epoch 1')\nstep()\n")
    done = dlaunch(tmp_path, "--start-method", "exec", "--summary-json", "out.json", train)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("dlaunch: the job failed") :].splitlines()
    assert report[0] == "dlaunch: the job failed: rank 0 raised ValueError: bad batch"
    assert report[2:4] == [
        "  at        train.py:5 in <module>: step()",
        "            train.py:2 in step: raise ValueError('bad\\x1b[31m batch')",
    ]
    assert "  output    epoch 1" in report
    assert len(report) <= 20
    log = next(line for line in report if line.startswith("  log ")).split()[1]
    assert "ValueError: bad" in (tmp_path / log).read_text()
    assert summary(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    ("program", "code", "headline"),
    [("exit 7", 7, "rank 0 ended with exit code 7"), ("kill -SEGV $$", 139, "rank 0 was ended by signal 11 (SIGSEGV)")],
)
def test_the_exit_code_of_the_worker_is_lost(tmp_path: Path, program: str, code: int, headline: str) -> None:
    done = dlaunch(tmp_path, "--no-python", "--summary-json", "out.json", "sh", "-c", program.replace("$$", "$$$$"))
    assert done.returncode == code
    assert done.stderr.startswith(f"dlaunch: the job failed: {headline}\n")
    assert summary(tmp_path)["exit_code"] == code


def test_an_interruption_is_not_told_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    words = ["--no-python", "--summary-json", "out.json", "sh", "-c", "echo > alive; exec sleep 1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dlaunch", "--log-dir", "logs", *words],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        (tmp_path / "alive").read_text()  # opens once the worker writes
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 143
    assert err.startswith("dlaunch: interrupted by SIGTERM after ")
    assert err.endswith("1 worker was stopped.\n")
    assert err.count("\n") == 1
    assert summary(tmp_path)["state"] == "interrupted"


def test_restarts_of_a_success_are_not_told_in_one_line(tmp_path: Path) -> None:
    done = dlaunch(
        tmp_path, "--no-python", "--max-restarts", "1", "sh", "-c", "test -e tried || { touch tried; exit 3; }"
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == (
        "dlaunch: succeeded after 1 of 1 restarts; the last one because rank 0 ended with exit code 3."
    )
