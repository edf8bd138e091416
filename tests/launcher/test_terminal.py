"""A person's terminal: complete, in order, readable, and never in the way of the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Mapping
from pathlib import Path

import pytest

from dlaunch.environ import Place
from dlaunch.launcher.colour import PALETTE
from dlaunch.launcher.terminal import Terminal
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind

DEADLINE_S = 60
PREPARE = """
import os, signal, sys, threading
from pathlib import Path
from dlaunch.environ import Place
from dlaunch.launcher.terminal import Terminal
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind
program = Program(ProgramKind.SCRIPT, "train.py", (), sys.executable)
log_dir = Path(os.environ["LOG_DIR"])
spec = JobSpec(program, output=OutputSpec(log_dir=log_dir))
"""
PUMP = """
import selectors, subprocess
from dlaunch.agent.layout import RunDirectory
from dlaunch.agent.pump import OutputPump
def run_workers(terminal, command, count):
    selector = selectors.DefaultSelector()
    pump = OutputPump(spec.output, terminal, selector)
    directory = RunDirectory.create(spec)
    workers = []
    for rank in range(count):
        ends = pump.open(Place(rank, rank, count, count), directory.worker(0, rank), directory.attempt(0))
        workers.append(subprocess.Popen(command, stdout=ends[0], stderr=ends[1]))
        for end in ends:
            os.close(end)
    while selector.get_map():
        for key, _ in selector.select():
            key.data(key.fd)
    for worker in workers:
        worker.wait()
    pump.close_all()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    names = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "TERM": "xterm-256color", "LOG_DIR": str(tmp_path / "logs"), "TMPDIR": str(tmp_path)}


def command(code: str) -> list[str]:
    return [sys.executable, "-c", PREPARE + code]


def run(code: str, environment: Mapping[str, str], **streams: int) -> subprocess.CompletedProcess[bytes]:
    where = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command(code), env=environment, timeout=DEADLINE_S, check=False, **where)  # type: ignore[call-overload,no-any-return]


def read_all(fd: int) -> bytes:
    """Everything until the last writer has gone (of a pty: EIO)."""
    pieces: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while select.select([fd], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            piece = os.read(fd, 1 << 16)
        except OSError:
            piece = b""
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    raise AssertionError("the stream did not end")


def raw_pty() -> tuple[int, int]:
    """A terminal that hands on bytes as they are."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    return ours, theirs


def in_process(**output: str | None) -> Terminal:
    program = Program(ProgramKind.SCRIPT, "train.py", (), sys.executable)
    return Terminal(JobSpec(program, output=OutputSpec(**output)))  # type: ignore[arg-type]


SLOW_READER = (
    PUMP
    + """
code = "import sys\\nfor i in range(200000): sys.stdout.write(f'{i} is a line of this worker\\\\n')"
with Terminal(spec) as terminal:
    run_workers(terminal, [sys.executable, "-S", "-c", code], 2)
    Path(os.environ["LOG_DIR"], "workers-finished").touch()
"""
)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_workers_finish_although_nobody_reads_the_console(
    kind: str, environment: dict[str, str], tmp_path: Path
) -> None:
    ours, theirs = os.pipe() if kind == "pipe" else raw_pty()
    environment["NO_COLOR"] = "1"
    launcher = subprocess.Popen(command(SLOW_READER), env=environment, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "logs" / "workers-finished").exists():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert launcher.poll() is None, "it waits for its reader now"
    lines = read_all(ours).splitlines()
    os.close(ours)
    assert launcher.communicate(timeout=DEADLINE_S)[1] == b""
    assert launcher.returncode == 0
    for rank in range(2):
        own = [line[4:] for line in lines if line.startswith(b"0:%d " % rank)]
        assert own == [b"%d is a line of this worker" % i for i in range(200_000)]
    assert len(lines) == 400_000


def test_a_reader_that_goes_away_ends_neither_the_job_nor_its_messages(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    for i in range(100_000):
        terminal.write("stdout", b"a line of some length\\n")
    terminal.notice("the job went on")
print("the end", file=sys.stderr)
"""
    launcher = subprocess.Popen(command(code), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"a line of some length\n"
    launcher.stdout.close()
    launcher.stdout = None
    assert launcher.communicate(timeout=DEADLINE_S)[1] == b"dlaunch: the job went on\nthe end\n"
    assert launcher.returncode == 0


def test_a_terminal_that_was_hung_up_is_no_error(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    sys.stdin.readline()
    terminal.write("stdout", b"nobody sees this\\n")
    terminal.notice("but this")
"""
    ours, theirs = raw_pty()
    streams = {"stdin": subprocess.PIPE, "stdout": theirs, "stderr": subprocess.PIPE}
    launcher = subprocess.Popen(command(code), env=environment, **streams)  # type: ignore[call-overload]
    os.close(theirs)
    os.close(ours)
    assert launcher.communicate(b"go\n", timeout=DEADLINE_S)[1] == b"dlaunch: but this\n"
    assert launcher.returncode == 0


def test_a_closed_stdout_is_no_error(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    terminal.write("stdout", b"nobody sees this\\n")
    terminal.notice("but this")
"""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command(code)]
    done = subprocess.run(shell, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"dlaunch: but this\n")


def test_a_stdout_that_cannot_be_written_is_told_once(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    for i in range(1000):
        terminal.write("stdout", b"x" * 1000 + b"\\n")
"""
    with Path("/dev/full").open("wb") as full:
        done = run(code, environment, stdout=full.fileno())
    sentence = b"dlaunch: stdout cannot be written (No space left on device); the job goes on without it.\n"
    assert (done.returncode, done.stderr) == (0, sentence)


def test_an_impatient_person_need_not_wait_for_the_reader(environment: dict[str, str]) -> None:
    code = """
terminal = Terminal(spec)
signal.signal(signal.SIGINT, lambda *_: terminal.abandon())
for i in range(1000):
    terminal.write("stdout", b"x" * 9999 + b"\\n")
print("closing", file=sys.stderr, flush=True)
terminal.close()
terminal.write("stdout", b"too late")
print("closed", file=sys.stderr)
"""
    launcher = subprocess.Popen(command(code), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    assert launcher.stdout is not None
    assert launcher.stderr.readline() == b"closing\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 0  # with its stdout still unread
    assert launcher.stderr.read() == b"closed\n"
    assert b"too late" not in launcher.stdout.read()
    launcher.stdout.close()
    launcher.stderr.close()


def test_blocks_of_both_streams_stay_in_order(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    for i in range(30_000):
        terminal.write("stderr" if i % 3 else "stdout", b"%d\\n" % i)
    terminal.notice("the end")
"""
    done = run(code, environment, stderr=subprocess.STDOUT)
    assert done.stdout.splitlines() == [*(b"%d" % i for i in range(30_000)), b"dlaunch: the end"]


HALF_A_LINE = """
with Terminal(spec) as terminal:
    terminal.notice("first")
    terminal.write("stdout", b"\\r 50%")
    terminal.notice("second\\nof two lines")
    terminal.notice("third")
"""


def test_a_notice_begins_on_a_line_of_its_own(environment: dict[str, str]) -> None:
    done = run(HALF_A_LINE, environment, stderr=subprocess.STDOUT)
    assert done.stdout == b"dlaunch: first\n\r 50%\ndlaunch: second of two lines\ndlaunch: third\n"


def test_the_report_stands_below_half_a_line_and_is_shown_as_it_is(environment: dict[str, str]) -> None:
    code = """
with Terminal(spec) as terminal:
    terminal.write("stdout", b"half a line")
    terminal.report("what\\n  \\x1b[1mhappened\\x1b[0m")
"""
    done = run(code, environment, stderr=subprocess.STDOUT)
    assert done.stdout == b"half a line\nwhat\n  \x1b[1mhappened\x1b[0m\n"


def test_half_a_line_elsewhere_does_not_touch_a_notice(environment: dict[str, str]) -> None:
    done = run(HALF_A_LINE, environment)
    assert done.stdout == b"\r 50%"
    assert done.stderr == b"dlaunch: first\ndlaunch: second of two lines\ndlaunch: third\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_the_flags_of_a_shared_descriptor_are_not_touched_and_a_non_blocking_one_is_no_trouble(
    blocking: bool, environment: dict[str, str]
) -> None:
    code = """
with Terminal(spec) as terminal:
    for i in range(100_000):
        terminal.write("stdout", b"%d\\n" % i)
    print("queued", file=sys.stderr, flush=True)
"""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, blocking)
    flags = fcntl.fcntl(theirs, fcntl.F_GETFL)
    launcher = subprocess.Popen(command(code), env=environment, stdout=theirs, stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    assert launcher.stderr.readline() == b"queued\n", "the pipe is full now"
    assert fcntl.fcntl(theirs, fcntl.F_GETFL) == flags
    os.close(theirs)
    assert read_all(ours).splitlines() == [b"%d" % i for i in range(100_000)]
    os.close(ours)
    assert launcher.communicate(timeout=DEADLINE_S)[1] == b""
    assert launcher.returncode == 0


COLOURFUL = """
with Terminal(spec) as terminal:
    for rank in (0, 1):
        prefix = terminal.prefix(Place(rank, rank, 2, 2), "stdout", tee=False)
        terminal.write("stdout", prefix + b"plain\\n" + prefix + b"\\x1b[31mred\\n")
    terminal.notice("note")
"""


def on_a_terminal(code: str, environment: Mapping[str, str]) -> bytes:
    ours, theirs = raw_pty()
    launcher = subprocess.Popen(command(code), env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = read_all(ours)
    os.close(ours)
    assert launcher.wait(DEADLINE_S) == 0
    return output


def test_on_a_terminal_each_rank_has_its_colour_and_a_workers_own_ends_with_its_line(
    environment: dict[str, str],
) -> None:
    lines = on_a_terminal(COLOURFUL, environment).split(b"\n")
    for rank in (0, 1):
        prefix = b"\x1b[38;5;%dm0:%d \x1b[0m" % (PALETTE[rank], rank)
        assert lines[2 * rank : 2 * rank + 2] == [prefix + b"plain", prefix + b"\x1b[31mred\x1b[0m"]
    assert lines[4:] == [b"\x1b[1mdlaunch:\x1b[0m note", b""]


PLAIN = b"0:0 plain\n0:0 \x1b[31mred\n0:1 plain\n0:1 \x1b[31mred\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_person_can_have_a_terminal_without_colours(name: str, value: str, environment: dict[str, str]) -> None:
    assert on_a_terminal(COLOURFUL, {**environment, name: value}) == PLAIN + b"dlaunch: note\n"


def test_a_pipe_gets_no_colours_of_ours(environment: dict[str, str]) -> None:
    done = run(COLOURFUL, environment)
    assert (done.stdout, done.stderr) == (PLAIN, b"dlaunch: note\n")


@pytest.mark.parametrize(
    ("place", "tee", "template", "expected"),
    [
        (Place(3, 1, 4, 2, group_rank=1, group_world_size=2), False, None, b"1:3 "),
        (Place(0, 0, 1, 1), False, None, b""),
        (Place(0, 0, 2, 1, group_world_size=2), False, None, b"0:0 "),
        (Place(3, 1, 4, 2, role="trainer"), True, None, b"[trainer1]:"),
        (Place(0, 0, 1, 1), True, None, b"[default0]:"),
        (Place(3, 1, 4, 2), False, "${role_name}/${local_rank}/${rank}/$other> ", b"default/1/3/$other> "),
        (Place(0, 0, 1, 1), True, "w ", b"w "),
        (Place(3, 1, 4, 2), True, "", b""),
    ],
)
def test_the_prefix(
    place: Place, tee: bool, template: str | None, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert in_process(line_prefix_template=template).prefix(place, "stdout", tee=tee) == expected


def test_no_thread_is_started_before_there_is_something_to_write() -> None:
    before = threading.active_count()
    with in_process() as terminal:
        terminal.prefix(Place(0, 0, 2, 2), "stdout", tee=False)
        terminal.write("stdout", b"")
        assert threading.active_count() == before


def test_what_found_no_room_is_counted_and_told(environment: dict[str, str], tmp_path: Path) -> None:
    code = """
import tempfile
from dlaunch.launcher import spool
spool.EMERGENCY_BYTES = 500_500
tempfile.tempdir = os.environ["LOG_DIR"]  # which is missing, as good as full
with Terminal(spec) as terminal:
    for i in range(6000):
        terminal.write("stdout", b"%999d\\n" % i)
    terminal.write("stdout", b"6000\\n")  # there would be room for so little
    print("queued", file=sys.stderr, flush=True)
    sys.stdin.readline()
"""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    launcher = subprocess.Popen(command(code), env=environment, **streams)  # type: ignore[call-overload]
    assert launcher.stderr.readline() == b"queued\n"
    output, errors = launcher.communicate(b"go\n", timeout=DEADLINE_S)
    shown = [int(line) for line in output.splitlines()]
    assert shown == list(range(len(shown)))
    assert len(shown) < 6000
    missing = (6000 - len(shown)) * 1000 + len(b"6000\n")
    assert errors.startswith(b"dlaunch: %s bytes of output are missing here" % f"{missing:,}".encode())
    with contextlib.suppress(FileNotFoundError):
        assert list((tmp_path / "logs").iterdir()) == []
