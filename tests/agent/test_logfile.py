"""A log file that fails harms nothing but itself, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlaunch.agent.logfile import LogFile
from dlaunch.agent.writer import FileWriter

from .hung_file import hang, read_all

DEADLINE_S = 60


@pytest.mark.parametrize("sizes", [(1000,) * 10, (4900, 200), (9000,)])
def test_a_log_file_that_ended_early_says_so_at_its_end(sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    code = (
        "import pathlib, resource, sys\n"
        "from dlaunch.agent.logfile import LogFile\n"
        "from dlaunch.agent.writer import FileWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "writer = FileWriter()\n"
        "file = LogFile(pathlib.Path(sys.argv[1]), print, writer)\n"
        "for size in map(int, sys.argv[2:]):\n"
        "    file.write(b'x' * size)\n"
        "    assert writer.wait(60)\n"
        "file.close()\n"
        "assert writer.wait(60)\n"
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
    writer = FileWriter()
    file = LogFile(tmp_path / "below" / "stdout.log", notices.append, writer)
    file.write(b"kept")
    assert not file.is_done
    file.close()
    file.write(b"dropped")
    file.close()
    assert writer.wait(DEADLINE_S)
    assert file.is_done
    assert (tmp_path / "below" / "stdout.log").read_bytes() == b"kept"
    assert notices == []


def test_what_an_earlier_run_left_in_a_log_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"earlier\n")
    writer = FileWriter()
    file = LogFile(path, print, writer)
    file.write(b"later\n")
    file.close()
    assert writer.wait(DEADLINE_S)
    assert path.read_bytes() == b"earlier\nlater\n"


def test_what_is_written_comes_in_order_however_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    writer = FileWriter()
    file = LogFile(path, print, writer)
    chunks = [b"%d\n" % number * (number % 7) + b"x" * (number * 1000 % 300_000) for number in range(400)]
    for chunk in chunks:
        file.write(chunk)
    file.close()
    assert writer.wait(DEADLINE_S)
    assert path.read_bytes() == b"".join(chunks)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A file that hangs."""
    return hang(tmp_path / "hangs")


def test_a_file_that_hangs_stops_nobody_who_writes_to_it_and_loses_nothing_when_it_goes_on(pipe: Path) -> None:
    notices: list[str] = []
    writer = FileWriter(1 << 20)
    file = LogFile(pipe, notices.append, writer)
    data = bytes(range(256)) * 1024
    count = 0
    while file.has_room:
        file.write(data)
        count += 1
    assert count >= 4
    file.write(data)  # what has to be taken all the same
    file.close()
    assert not writer.wait(0.05)
    assert not file.is_done
    assert read_all(pipe, (count + 1) * len(data)) == data * (count + 1)
    assert writer.wait(DEADLINE_S)
    assert file.is_done
    assert file.has_room
    assert notices == []


def test_no_more_than_twice_the_bound_is_held_for_a_file_that_hangs_and_that_is_told_once(pipe: Path) -> None:
    notices: list[str] = []
    writer = FileWriter(1 << 20)
    file = LogFile(pipe, notices.append, writer)
    data = b"x" * (1 << 18)
    for _ in range(100):
        file.write(data)
    file.close()
    assert len(notices) == 1
    assert notices[0].startswith(f"{pipe} is not written in time")
    marker = b"\n[dlaunch: this file ends here, the rest could not be written: the file system did not keep up]\n"
    found = read_all(pipe, 8 * len(data) + len(marker))
    assert writer.wait(DEADLINE_S)
    kept, rest = found[: -len(marker)], found[-len(marker) :]
    assert kept == b"x" * len(kept)
    assert rest == marker


def test_each_file_has_its_share_of_the_room(pipe: Path, tmp_path: Path) -> None:
    writer = FileWriter(1 << 20)
    hanging, fine = LogFile(pipe, print, writer), LogFile(tmp_path / "fine", print, writer)
    while hanging.has_room:
        hanging.write(b"x" * 4096)
    assert fine.has_room
    fine.write(b"one line\n")
    hanging.close()
    fine.close()
    read_all(pipe, 1 << 19)
    assert writer.wait(DEADLINE_S)
    assert (tmp_path / "fine").read_bytes() == b"one line\n"


def test_the_thread_ends_with_the_last_file_and_another_starts_with_the_next(tmp_path: Path) -> None:
    writer = FileWriter()
    for number in range(2):
        before = set(threading.enumerate())
        file = LogFile(tmp_path / str(number), print, writer)
        (thread,) = set(threading.enumerate()) - before
        file.close()
        assert writer.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
