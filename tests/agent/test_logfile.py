"""A log file that fails harms nothing but itself, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlaunch.agent.logfile import LogFile

DEADLINE_S = 60


@pytest.mark.parametrize("sizes", [(1000,) * 10, (4900, 200), (9000,)])
def test_a_log_file_that_ended_early_says_so_at_its_end(sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    code = (
        "import pathlib, resource, sys\n"
        "from dlaunch.agent.logfile import LogFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "file = LogFile(pathlib.Path(sys.argv[1]), print)\n"
        "for size in map(int, sys.argv[2:]): file.write(b'x' * size)\n"
        "file.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path, *map(str, sizes)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert re.fullmatch(r".*stdout\.log cannot be written \(File too large\); the job goes on.*\n", done.stdout)
    text = path.read_bytes()
    assert len(text) == 5000
    assert text.startswith(b"x" * 4900)
    assert text.endswith(b"\n[dlaunch: this file ends here, the rest could not be written: File too large]\n")


def test_a_closed_log_file_takes_nothing_more(tmp_path: Path) -> None:
    notices: list[str] = []
    file = LogFile(tmp_path / "below" / "stdout.log", notices.append)
    file.write(b"kept")
    file.close()
    file.write(b"dropped")
    file.close()
    assert (tmp_path / "below" / "stdout.log").read_bytes() == b"kept"
    assert notices == []


def test_what_an_earlier_run_left_in_a_log_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"earlier\n")
    file = LogFile(path, print)
    file.write(b"later\n")
    file.close()
    assert path.read_bytes() == b"earlier\nlater\n"
