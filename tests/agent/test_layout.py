"""The run directory: where torchrun's users look for it, private by default, and never in the way of a job."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dlaunch.agent.layout import (
    AttemptFiles,
    RunDirectory,
    WorkerFiles,
    default_log_dir,
    default_log_path,
    prune_old_runs,
    safe_name,
)
from dlaunch.errors import ConfigurationError, ExitCode
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind


def job(run_id: str = "job", **output: Any) -> JobSpec:
    program = Program(ProgramKind.SCRIPT, "train.py", (), "/usr/bin/python")
    return JobSpec(program, run_id=run_id, output=OutputSpec(**output))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of this test's own, where the default log directory then is."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_stand_where_torchrun_puts_them(tmp_path: Path) -> None:
    run = RunDirectory.create(job("my-run", log_dir=tmp_path / "logs", stdout_filters=("loss",)))
    assert run.path is not None
    assert run.path.parent == tmp_path / "logs"
    assert run.path.name.startswith("my-run_")
    assert len(run.path.name) == len("my-run_") + 8
    files = run.worker(2, 11)
    attempt = run.path / "attempt_2"
    assert files == WorkerFiles(attempt / "11/stdout.log", attempt / "11/stderr.log", attempt / "11/error.json")
    assert run.attempt(2) == AttemptFiles(attempt / "filtered_stdout.log", None)
    assert run.record == run.path / "record.json"


def test_two_runs_of_one_name_share_nothing(tmp_path: Path) -> None:
    spec = job(log_dir=tmp_path)
    assert RunDirectory.create(spec).path != RunDirectory.create(spec).path


def test_a_name_that_is_taken_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([b"\0\0\0\0", b"\0\0\0\0", b"\0\0\0\1"])
    monkeypatch.setattr(os, "urandom", lambda size: next(drawn)[:size])
    runs = [RunDirectory.create(job(log_dir=tmp_path)) for _ in range(2)]
    assert [run.path for run in runs] == [tmp_path / "job_00000000", tmp_path / "job_00000001"]


def test_no_files_are_kept_when_none_are_wanted(temporary: Path) -> None:
    run = RunDirectory.create(job(keep_files=False, stdout_filters=("loss",), stderr_filters=("loss",)))
    assert run.path is None
    assert run.record is None
    assert run.worker(0, 0) == WorkerFiles(None, None, None)
    assert run.attempt(0) == AttemptFiles(None, None)
    assert list(temporary.iterdir()) == []


def test_others_cannot_read_logs_in_the_default_place() -> None:
    before = os.umask(0)
    try:
        run = RunDirectory.create(job())
    finally:
        os.umask(before)
    assert run.path is not None
    assert run.path.parent == default_log_path()
    assert (mode(run.path), mode(run.path.parent)) == (0o700, 0o700)


def test_the_umask_decides_in_a_directory_that_the_user_gave(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run = RunDirectory.create(job(log_dir=tmp_path / "logs"))
    finally:
        os.umask(before)
    assert run.path is not None
    assert mode(run.path) == 0o750


def test_a_default_directory_that_others_could_read_is_closed_to_them() -> None:
    default_log_path().mkdir(mode=0o755)
    assert mode(default_log_dir()) == 0o700


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_trap_in_the_default_place_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "link":
        default_log_path().symlink_to(tmp_path)
    else:
        default_log_path().touch()
    with pytest.raises(ConfigurationError, match=r"is not a directory.*--log-dir") as caught:
        RunDirectory.create(job())
    assert caught.value.exit_code == ExitCode.CONFIGURATION


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_another_users_directory_in_the_default_place_is_refused() -> None:
    default_log_path().mkdir()
    os.chown(default_log_path(), 12345, 12345)
    with pytest.raises(ConfigurationError, match=r"belongs to another user.*--log-dir"):
        RunDirectory.create(job())


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_log_directory_that_cannot_be_made_is_told_with_the_fix(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"The log directory .* cannot be written: .*--log-dir") as caught:
        RunDirectory.create(job(log_dir=tmp_path / place))
    assert caught.value.exit_code == ExitCode.CONFIGURATION


def test_a_log_directory_that_cannot_be_written_is_told_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"The log directory /proc cannot be written: .*--log-dir"):
        RunDirectory.create(job(log_dir=Path("/proc")))


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("plain-1.0", "plain-1.0"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("a b\n$(c)*", "a_b_c_"),
        ("-rf", "rf"),
        ("..", "none"),
        ("", "none"),
        ("\u00fc\0", "_"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_run_id_is_made_safe_for_a_file_name(run_id: str, name: str) -> None:
    assert safe_name(run_id) == name


def test_a_run_elsewhere_is_found_from_the_default_directory(tmp_path: Path) -> None:
    run = RunDirectory.create(job(log_dir=tmp_path / "logs"))
    assert run.path is not None
    assert (default_log_path() / run.path.name).resolve() == run.path.resolve()


def test_a_run_elsewhere_does_not_need_the_default_directory(tmp_path: Path) -> None:
    default_log_path().touch()
    assert RunDirectory.create(job(log_dir=tmp_path / "logs")).path is not None


def finished_runs(count: int) -> list[Path]:
    """So many finished runs, the oldest first."""
    paths = []
    for age in range(count, 0, -1):
        run = RunDirectory.create(job())
        assert run.path is not None
        (run.path / "attempt_0" / "0").mkdir(parents=True)
        run.close()
        os.utime(run.path, (1e9 - age, 1e9 - age))
        paths.append(run.path)
    return paths


def test_only_the_newest_finished_runs_are_kept() -> None:
    runs = finished_runs(5)
    prune_old_runs(default_log_path(), keep=2)
    assert [path.exists() for path in runs] == [False, False, False, True, True]


def test_a_run_whose_agent_lives_is_never_removed() -> None:
    script = (
        "import pathlib, sys\n"
        "from dlaunch.agent.layout import RunDirectory\n"
        "run = RunDirectory(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    runs = finished_runs(3)
    command = [sys.executable, "-c", script, str(runs[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "locked\n"
        prune_old_runs(default_log_path(), keep=0)
        assert [path.exists() for path in runs] == [True, False, False]
        agent.kill()
        agent.wait()
    prune_old_runs(default_log_path(), keep=0)
    assert not runs[0].exists()


def test_of_a_run_elsewhere_only_the_link_is_removed(tmp_path: Path) -> None:
    run = RunDirectory.create(job(log_dir=tmp_path / "logs"))
    assert run.path is not None
    link = default_log_path() / run.path.name
    prune_old_runs(default_log_path(), keep=0)
    assert link.is_symlink(), "its agent lives"
    run.close()
    prune_old_runs(default_log_path(), keep=0)
    assert not link.is_symlink()
    assert run.path.is_dir()


def test_a_link_that_leads_nowhere_is_removed() -> None:
    link = default_log_dir() / "job_0123abcd"
    link.symlink_to("/nowhere")
    prune_old_runs(default_log_path(), keep=0)
    assert not link.is_symlink()


def test_what_is_no_run_is_left_alone() -> None:
    (default_log_dir() / "notes").mkdir()
    prune_old_runs(default_log_path(), keep=0)
    assert (default_log_path() / "notes").is_dir()


def test_pruning_a_missing_directory_is_no_error(tmp_path: Path) -> None:
    prune_old_runs(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
