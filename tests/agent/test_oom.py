"""The kernel's counters, in each layout that kernels offer them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlaunch.agent.oom import oom_kills


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/user/job\n", "cg/user/job/memory.events", "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n"),
        (
            "3:cpu:/x\n2:memory:/job\n0::/y\n",
            "cg/memory/job/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
        ("0::/job\n", "proc/vmstat", "nr_free_pages 5\noom_kill 2\n"),
    ],
    ids=["cgroup v2", "cgroup v1", "whole host"],
)
def test_the_count_is_read_where_this_kernel_keeps_it(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", cgroup)
    write(tmp_path / file, text)
    assert oom_kills(tmp_path / "proc", tmp_path / "cg") == 2


def test_no_count_is_invented_where_none_can_be_read(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "proc", tmp_path / "cg") is None


def test_garbage_is_not_a_count(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "garbage\n0::/job\n")
    write(tmp_path / "cg/job/memory.events", "oom_kill many\n")
    assert oom_kills(tmp_path / "proc", tmp_path / "cg") is None


def test_this_host_has_a_count() -> None:
    assert isinstance(oom_kills(), int)
