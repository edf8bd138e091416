"""The workers' output reaches files and console whole, in order and unchanged, whatever a worker does with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlaunch.agent.console import Stream
from dlaunch.agent.layout import AttemptFiles, RunDirectory, WorkerFiles
from dlaunch.agent.pump import CHUNK_BYTES, PIPE_BYTES, OutputPump
from dlaunch.agent.writer import FileWriter
from dlaunch.environ import Place
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind, StreamMap, Streams

from .hung_file import hang, read_all

DEADLINE_S = 60


class Screen:
    """A console that keeps what it is given."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Stream, bytes]] = []
        self.notices: list[str] = []

    def prefix(self, place: Place, stream: Stream, *, tee: bool) -> bytes:
        if tee:
            return b"[%s%d]:" % (place.role.encode(), place.local_rank)
        return b"%d| " % place.rank if place.world_size > 1 else b""

    def write(self, stream: Stream, data: bytes) -> None:
        self.blocks.append((stream, data))

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def text(self, stream: Stream = "stdout") -> bytes:
        return b"".join(data for name, data in self.blocks if name == stream)

    def lines_of(self, rank: int, stream: Stream = "stdout") -> list[bytes]:
        """What a rank showed, its prefix taken off; every line must carry one."""
        lines = self.text(stream).split(b"\n")
        assert lines.pop() == b""
        own = [line.partition(b"| ") for line in lines]
        assert all(name.isdigit() for name, _, _ in own), [line for line in lines if not line[:1].isdigit()]
        return [text for name, _, text in own if int(name) == rank]


class Job:
    """A pump with its loop, and the writing ends of its workers' pipes."""

    def __init__(self, output: OutputSpec, directory: Path, world_size: int = 2) -> None:
        program = Program(ProgramKind.SCRIPT, "train.py", (), sys.executable)
        self.screen = Screen()
        self.selector = selectors.DefaultSelector()
        self.pump = OutputPump(output, self.screen, self.selector)
        self.directory = RunDirectory.create(JobSpec(program, output=output))
        self.world_size = world_size

    def open(self, local_rank: int = 0, attempt: int = 0) -> tuple[int, int]:
        place = Place(local_rank, local_rank, self.world_size, self.world_size)
        return self.pump.open(place, self.directory.worker(attempt, local_rank), self.directory.attempt(attempt))

    def start(self, command: list[str], local_rank: int = 0) -> subprocess.Popen[bytes]:
        stdout, stderr = self.open(local_rank)
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL)
        os.close(stdout)
        os.close(stderr)
        return process

    def turn(self) -> None:
        """Carry what is readable now."""
        for key, _ in self.selector.select(0):
            key.data(key.fd)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Carry until ``done()``."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline
            for key, _ in self.selector.select(0.05):
                key.data(key.fd)
            self.pump.show_updates()

    def run_to_the_end(self) -> None:
        """Carry until every pipe has ended."""
        self.run_until(lambda: not self.selector.get_map())
        self.pump.close_all()

    def log(self, local_rank: int = 0, stream: Stream = "stdout", attempt: int = 0) -> bytes:
        files = self.directory.worker(attempt, local_rank)
        path = files.stdout if stream == "stdout" else files.stderr
        assert path is not None
        try:
            return path.read_bytes()
        except FileNotFoundError:  # a thread of its own opens it
            return b""


@contextlib.contextmanager
def job_in(directory: Path, world_size: int = 2, **output: Any) -> Iterator[Job]:
    job = Job(OutputSpec(log_dir=directory, **output), directory, world_size)
    try:
        yield job
    finally:
        job.pump.close_all()
        job.directory.close()
        job.selector.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code]


BYTES = st.lists(st.sampled_from([b"line", b"\n", b"\0\xff", b"\n\n", b"x" * 70]) | st.binary(max_size=9), max_size=20)
WRITES = st.lists(st.tuples(st.integers(0, 2), st.booleans(), BYTES.map(b"".join)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(writes=WRITES)
def test_every_byte_is_in_the_file_and_every_line_whole_on_the_console(
    tmp_path: Path, writes: list[tuple[int, bool, bytes]]
) -> None:
    with job_in(tmp_path, world_size=3) as job:
        ends = [job.open(rank) for rank in range(3)]
        sent = {(rank, stream): b"" for rank in range(3) for stream in ("stdout", "stderr")}
        for rank, is_error, data in writes:
            text = data.replace(b"\r", b".")
            os.write(ends[rank][is_error], text)
            sent[rank, "stderr" if is_error else "stdout"] += text
            job.turn()
        for pair in ends:
            os.close(pair[0])
            os.close(pair[1])
        job.run_to_the_end()
        for rank in range(3):
            for stream in ("stdout", "stderr"):
                text = sent[rank, stream]
                assert job.log(rank, stream) == text
                shown = job.screen.lines_of(rank, stream)
                assert shown == text.removesuffix(b"\n").split(b"\n") if text else shown == []
    assert job.screen.notices == []


def test_a_million_lines_of_two_ranks_are_all_there_and_none_is_torn(tmp_path: Path) -> None:
    count = 500_000
    code = f"import sys\nfor i in range({count}): sys.stdout.write(f'{{i}} of this rank\\n')"
    with job_in(tmp_path) as job:
        workers = [job.start(python(code), rank) for rank in range(2)]
        job.run_to_the_end()
        assert [worker.wait(DEADLINE_S) for worker in workers] == [0, 0]
        expected = [b"%d of this rank" % i for i in range(count)]
        for rank in range(2):
            assert job.screen.lines_of(rank) == expected
            assert job.log(rank) == b"\n".join(expected) + b"\n"


def test_binary_output_without_a_newline_is_complete(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        worker = job.start(["dd", "if=/dev/zero", "bs=1M", "count=32", "status=none"])
        job.run_to_the_end()
        assert worker.wait(DEADLINE_S) == 0
        assert job.log() == bytes(32 << 20)
        assert job.screen.text() == b"0| " + bytes(32 << 20) + b"\n"


def test_a_line_of_ten_megabytes_stays_one_line_among_those_of_others(tmp_path: Path) -> None:
    long = "import sys\nfor _ in range(3): sys.stdout.write('x' * 10_000_000 + '\\n')"
    short = "import sys\nfor _ in range(20000): sys.stdout.write('short\\n')"
    with job_in(tmp_path) as job:
        workers = [job.start(python(long), 0), job.start(python(short), 1)]
        job.run_to_the_end()
        assert [worker.wait(DEADLINE_S) for worker in workers] == [0, 0]
        assert job.screen.lines_of(0) == [b"x" * 10_000_000] * 3
        assert job.screen.lines_of(1) == [b"short"] * 20_000


def test_the_only_worker_of_a_job_writes_to_the_console_as_it_comes(tmp_path: Path) -> None:
    with job_in(tmp_path, world_size=1) as job:
        stdout, stderr = job.open()
        for piece in (b"prompt: ", b"\r 50%", b"\r100%", b"\xff\0"):
            os.write(stdout, piece)
            job.turn()
            assert job.screen.blocks[-1] == ("stdout", piece)
        os.close(stdout)
        os.close(stderr)
        job.run_to_the_end()
        assert job.screen.text() == job.log() == b"prompt: \r 50%\r100%\xff\0"


def test_several_workers_with_an_empty_prefix_still_write_whole_lines(tmp_path: Path) -> None:
    class Bare(Screen):
        def prefix(self, place: Place, stream: Stream, *, tee: bool) -> bytes:
            return b""

    with job_in(tmp_path) as job:
        screen = Bare()
        job.pump = OutputPump(OutputSpec(), screen, job.selector)
        ends = [job.open(rank) for rank in range(2)]
        for rank in (0, 1, 0, 1):
            os.write(ends[rank][0], b"half")
            job.turn()
        for pair in ends:
            os.close(pair[0])
            os.close(pair[1])
        job.run_to_the_end()
        assert screen.text() == b"halfhalf\nhalfhalf\n"


ONLY_FIRST = StreamMap(by_local_rank=((0, Streams.BOTH),))


@pytest.mark.parametrize(
    ("output", "stdout", "stderr"),
    [
        ({}, b"0| o0\n1| o1\n", b"0| e0\n1| e1\n"),
        ({"redirects": StreamMap(Streams.OUT)}, b"", b"0| e0\n1| e1\n"),
        ({"redirects": ONLY_FIRST}, b"1| o1\n", b"1| e1\n"),
        ({"tee": StreamMap(Streams.ERR)}, b"0| o0\n1| o1\n", b"[default0]:e0\n[default1]:e1\n"),
        ({"redirects": StreamMap(Streams.BOTH), "tee": ONLY_FIRST}, b"[default0]:o0\n", b"[default0]:e0\n"),
        ({"local_ranks_filter": frozenset({1})}, b"1| o1\n", b"1| e1\n"),
        ({"local_ranks_filter": frozenset({1}), "tee": ONLY_FIRST}, b"1| o1\n", b"1| e1\n"),
        ({"local_ranks_filter": frozenset({7})}, b"", b""),
    ],
)
@pytest.mark.parametrize("keep_files", [True, False])
def test_what_shows_on_the_console(
    output: dict[str, Any], stdout: bytes, stderr: bytes, keep_files: bool, tmp_path: Path
) -> None:
    with job_in(tmp_path, keep_files=keep_files, **output) as job:
        for rank in range(2):
            ends = job.open(rank)
            for end, name in zip(ends, (b"o", b"e"), strict=True):
                os.write(end, b"%b%d\n" % (name, rank))
                os.close(end)
            job.turn()
        job.run_to_the_end()
        assert (job.screen.text("stdout"), job.screen.text("stderr")) == (stdout, stderr)
        if keep_files:
            assert [job.log(rank, "stdout") for rank in range(2)] == [b"o0\n", b"o1\n"]
            assert [job.log(rank, "stderr") for rank in range(2)] == [b"e0\n", b"e1\n"]
        else:
            assert list(tmp_path.iterdir()) == []


def test_lines_that_match_a_filter_are_copied_with_torchruns_prefix(tmp_path: Path) -> None:
    filters: dict[str, Any] = {
        "stdout_filters": ("loss", "acc"),
        "stderr_filters": ("Error",),
        "redirects": StreamMap(Streams.BOTH),
    }
    with job_in(tmp_path, **filters) as job:
        for rank in range(2):
            stdout, stderr = job.open(rank)
            for piece in (b"lo", b"ss 1\nnothing\nacc 2\r\n", b"loss\0\xff\n10%\rloss 3\r", b"\nthe last acc"):
                os.write(stdout, piece)
                job.turn()
            os.write(stderr, b"loss\nAn Error\n")
            os.close(stdout)
            os.close(stderr)
            job.run_until(lambda: not job.selector.get_map())
        job.pump.close_all()
        attempt = job.directory.attempt(0)
        assert attempt.filtered_stdout is not None
        assert attempt.filtered_stderr is not None
        copied = b"loss 1\nacc 2\nloss\0\xff\nloss 3\nthe last acc\n"
        assert attempt.filtered_stdout.read_bytes() == b"".join(
            b"[default%d]:%b" % (rank, line) for rank in range(2) for line in copied.splitlines(keepends=True)
        )
        assert attempt.filtered_stderr.read_bytes() == b"[default0]:An Error\n[default1]:An Error\n"


def test_each_attempt_has_its_own_files_and_the_earlier_ones_stay(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        for attempt in range(3):
            stdout, stderr = job.open(0, attempt)
            os.write(stdout, b"attempt %d" % attempt)
            os.close(stdout)
            os.close(stderr)
            job.pump.close_all()
            assert job.pump.tail(0, 5) == (f"attempt {attempt}",)
        assert [job.log(attempt=attempt) for attempt in range(3)] == [b"attempt 0", b"attempt 1", b"attempt 2"]


def test_draining_does_not_wait_for_a_process_that_holds_the_pipe(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        stdout, stderr = job.open()  # kept open here, as a worker's child would
        os.write(stdout, b"before the end\nunfinished")
        job.pump.drain(0)
        assert job.screen.lines_of(0) == [b"before the end"]
        assert job.pump.tail(0, 5) == ("before the end", "unfinished")
        os.write(stdout, b" line\n")
        job.turn()
        assert job.screen.lines_of(0) == [b"before the end", b"unfinished line"]
        os.write(stdout, b"the very last")
        job.pump.close_all()
        assert job.screen.lines_of(0)[-1] == b"the very last"
        assert job.log() == b"before the end\nunfinished line\nthe very last"
        os.close(stdout)
        os.close(stderr)


def test_draining_ends_although_a_process_goes_on_writing(tmp_path: Path) -> None:
    with job_in(tmp_path, redirects=StreamMap(Streams.BOTH)) as job:
        endless = job.start(["yes"])
        try:
            job.run_until(lambda: b"y\n" in job.log())
            job.pump.drain(0)
            job.pump.close_all()
        finally:
            endless.kill()
            endless.wait(DEADLINE_S)
        assert job.log().startswith(b"y\n" * 10)


def test_a_rank_that_floods_gets_no_more_than_its_share_of_a_turn(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        first, other = job.open(0), job.open(1)
        size = fcntl.fcntl(first[0], fcntl.F_GETPIPE_SZ)
        os.set_blocking(first[0], False)
        os.write(first[0], b"flood\n" * (size // 6))
        os.write(other[0], b"alone\n")
        job.turn()
        assert job.screen.lines_of(1) == [b"alone"]
        assert len(job.screen.lines_of(0)) == min(CHUNK_BYTES, size // 6 * 6) // 6
        for end in (*first, *other):
            os.close(end)


def test_a_worker_can_write_a_megabyte_while_the_agent_is_busy(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        ends = job.open()
        for end in ends:
            assert fcntl.fcntl(end, fcntl.F_GETPIPE_SZ) == PIPE_BYTES
            assert not os.get_inheritable(end)
            assert os.get_blocking(end), "a worker must not find its stdout non-blocking"
            os.close(end)


def test_nothing_is_left_open_when_an_attempt_has_ended(tmp_path: Path) -> None:
    with job_in(tmp_path, stdout_filters=("x",), stderr_filters=("x",)) as job:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for rank in range(2):
            for end in job.open(rank):
                os.close(end)
        job.pump.close_all()
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert not job.selector.get_map()


def test_a_full_disk_costs_the_log_file_but_neither_the_job_nor_the_console(tmp_path: Path) -> None:
    screen, selector = Screen(), selectors.DefaultSelector()
    pump = OutputPump(OutputSpec(), screen, selector)
    files = WorkerFiles(Path("/dev/full"), tmp_path / "stderr.log", tmp_path / "error.json")
    stdout, stderr = pump.open(Place(0, 0, 2, 2), files, AttemptFiles())
    for line in (b"one\n", b"two\n", b"three\n"):
        os.write(stdout, line)
        os.write(stderr, line)
        pump.drain(0)
    os.close(stdout)
    os.close(stderr)
    pump.close_all()
    assert screen.lines_of(0) == [b"one", b"two", b"three"]
    assert (tmp_path / "stderr.log").read_bytes() == b"one\ntwo\nthree\n"
    assert len(screen.notices) == 1
    assert re.fullmatch(
        r"/dev/full cannot be written \(No space left on device\); the job goes on.*", screen.notices[0]
    )


def test_a_log_file_that_cannot_be_opened_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    screen, selector = Screen(), selectors.DefaultSelector()
    pump = OutputPump(OutputSpec(), screen, selector)
    files = WorkerFiles(tmp_path / "file/stdout.log", tmp_path / "stderr.log", None)
    ends = pump.open(Place(0, 0, 2, 2), files, AttemptFiles())
    os.write(ends[0], b"one\n")
    for end in ends:
        os.close(end)
    pump.close_all()
    assert screen.lines_of(0) == [b"one"]
    assert [notice.startswith(f"{tmp_path}/file/stdout.log cannot be opened") for notice in screen.notices] == [True]


def hang_log(job: Job) -> Path:
    """Have the first worker's log file hang."""
    path = job.directory.worker(0, 0).stdout
    assert path is not None
    return hang(path)


def write_until_full(end: int, job: Job) -> bytes:
    """Write as a worker that floods does, until nothing is carried any more; what was written."""
    os.set_blocking(end, False)
    written = bytearray()
    while True:
        try:
            written += b"%015d\n" % len(written) * 256
            os.write(end, written[-4096:])
        except BlockingIOError:
            del written[-4096:]
            before = fcntl.ioctl(end, termios.FIONREAD, b"\0\0\0\0")
            job.turn()
            if fcntl.ioctl(end, termios.FIONREAD, b"\0\0\0\0") == before:
                return bytes(written)


def test_a_log_file_that_hangs_holds_up_only_the_worker_that_floods_it_and_loses_nothing(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        job.pump = OutputPump(OutputSpec(), job.screen, job.selector, FileWriter(8 << 20))
        hung = hang_log(job)
        flood, other = job.open(0), job.open(1)
        written = write_until_full(flood[0], job)
        assert len(written) > (8 << 20) // 4, "its share was held"
        for number in range(100):
            os.write(other[0], b"%d\n" % number)
            job.turn()
        assert job.screen.lines_of(1) == [b"%d" % number for number in range(100)]
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(read_all(hung, len(written))))
        reader.start()
        job.run_until(lambda: not reader.is_alive())
        for end in (*flood, *other):
            os.close(end)
        job.run_to_the_end()
        assert found == [written]
        assert b"\n".join(job.screen.lines_of(0)) + b"\n" == written
        assert job.log(1) == b"".join(b"%d\n" % number for number in range(100))
        assert job.screen.notices == []


def test_an_attempt_ends_although_a_log_file_hangs_and_the_file_is_named(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        job.pump = OutputPump(OutputSpec(), job.screen, job.selector, FileWriter(1 << 20))
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        hung = hang_log(job)
        flood, other = job.open(0), job.open(1)
        written = write_until_full(flood[0], job)
        os.write(other[0], b"behind it\n")
        for end in (*flood, *other):
            os.close(end)
        job.pump.drain(0)
        job.pump.close_all(wait_s=0.1)
        assert b"\n".join(job.screen.lines_of(0)) + b"\n" == written, "the console has it all"
        assert not job.selector.get_map()
        (notice,) = job.screen.notices
        assert notice.startswith(f"{hung} and 1 more cannot be completed: the file system does not answer")
        assert read_all(hung, len(written)) == written
        job.pump.close_all(wait_s=DEADLINE_S)
        assert job.log(1) == b"behind it\n"
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_the_end_of_an_attempt_need_not_wait_for_the_files(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        hung = hang_log(job)
        stdout, stderr = job.open(0)
        os.write(stdout, b"x" * 100_000)
        os.close(stdout)
        os.close(stderr)
        job.pump.close_all(wait_s=0)
        assert job.screen.notices == []
        assert read_all(hung, 100_000) == b"x" * 100_000


@pytest.mark.parametrize(
    ("stdout", "stderr", "most", "expected"),
    [
        (b"o1\no2\n", b"e1\ne2\n", 3, ("o2", "e1", "e2")),
        (b"o1\no2\n", b"e1\ne2\n", 2, ("e1", "e2")),
        (b"o1\n", b"", 5, ("o1",)),
        (b"", b"", 5, ()),
        (b"", b"a\n\n  \nb", 5, ("a", "b")),
        (b"", b"\r 1%\r99%\r\n\x1b[31mred\x1b[0m\x07\n\r50%\r    \r", 5, ("99%", "red", "50%")),
        (b"", b"\xff\xfe!\n", 5, ("\ufffd\ufffd!",)),
        (b"", b"y" * 900 + b"\n", 5, ("y" * 499 + "…",)),
        (b"", b"first\n" + b"z" * 17_000 + b"\nlast\n", 5, ("last",)),
    ],
)
def test_the_last_lines_of_a_worker(
    stdout: bytes, stderr: bytes, most: int, expected: tuple[str, ...], tmp_path: Path
) -> None:
    with job_in(tmp_path) as job:
        for end, data in zip(job.open(), (stdout, stderr), strict=True):
            os.write(end, data)
            os.close(end)
        job.pump.close_all()
        assert job.pump.tail(0, most) == expected
        assert job.pump.tail(1, most) == ()


def test_progress_bars_of_eight_ranks_stay_readable(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(400), desc='epoch', mininterval=0, miniters=1): pass\n"
        "tqdm.write('done', file=sys.stderr)\n"
    )
    with job_in(tmp_path, world_size=8) as job:
        workers = [job.start([sys.executable, "-c", code], rank) for rank in range(8)]
        job.run_to_the_end()
        assert [worker.wait(DEADLINE_S) for worker in workers] == [0] * 8
        for rank in range(8):
            assert job.log(rank, "stderr").count(b"\r") > 400
            lines = job.screen.lines_of(rank, "stderr")
            assert re.match(rb"epoch: 100%.* 400/400 ", lines[-2])
            assert lines[-1] == b"done"
            assert len(lines) < 100, "one a second, not one for each of 400 steps"
            assert [line for line in lines if not re.fullmatch(rb"epoch: +\d+%\|.*\] *|done", line)] == []


def test_a_progress_bar_that_stands_still_is_shown_in_time(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        stdout, stderr = job.open()
        os.write(stdout, b"\r10%\r20%\r30%")
        job.turn()
        assert job.screen.text() == b"0| 20%\n"
        assert job.pump.due_at is not None
        job.run_until(lambda: job.screen.text() == b"0| 20%\n0| 30%\n")
        assert job.pump.due_at is None
        os.close(stdout)
        os.close(stderr)
