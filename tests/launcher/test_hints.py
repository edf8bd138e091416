"""The one sentence of advice, as a table."""

from __future__ import annotations

import signal

import pytest

from dlaunch.launcher.hints import hint
from dlaunch.outcome import ExceptionInfo, ExitStatus, FailureKind
from dlaunch.spec import ProgramKind
from tests.launcher.failures import FAILURE

BY_EXCEPTION = [
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "The GPU ran out of memory"),
    ("RuntimeError", "CUDA error: out of memory. CUDA out of memory", "The GPU ran out of memory"),
    ("RuntimeError", "CUDA error: invalid device ordinal", "There are more workers than visible GPUs"),
    ("ModuleNotFoundError", "No module named 'yaml'", "Install yaml for the Python"),
    ("ModuleNotFoundError", "No module named 'sklearn.model'", "Install sklearn for the Python"),
    ("ImportError", "cannot import name 'x' from 'y' (y.py)", "The module was found but could not be loaded"),
    (
        "RuntimeError",
        "The server socket has failed to listen. EADDRINUSE, address already in use",
        "Another process has",
    ),
    ("OSError", "[Errno 98] Address already in use", "Another process has that port: leave --master-port out"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'data'", "Relative paths start in the folder"),
    ("PermissionError", "[Errno 13] Permission denied: '/x'", "The user who runs dlaunch may not"),
    ("RuntimeError", "[../gloo/pair.cc:534] Connection closed by peer [10.0.0.1]:1", "It lost a peer"),
    ("torch.distributed.DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:1", "It lost a peer"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", "A data loading process died"),
    ("OSError", "[Errno 28] No space left on device", "A disk is full"),
    ("OSError", "[Errno 24] Too many open files", "Raise the limit with ulimit -n"),
    ("MemoryError", "", "The host ran out of memory"),
    ("ValueError", "Default process group has not been initialized", "Call torch.distributed.init_process_group()"),
    ("KeyError", "'RANK'", "dlaunch sets this variable"),
]


@pytest.mark.parametrize(("kind", "message", "begins"), BY_EXCEPTION)
def test_an_exception_gets_another_hint(kind: str, message: str, begins: str) -> None:
    failure = FAILURE._replace(exception=ExceptionInfo(kind, message))
    assert hint(failure).startswith(begins)


def test_an_exception_that_says_it_all_gets_a_hint() -> None:
    assert hint(FAILURE) == ""


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGSEGV, "PYTHONFAULTHANDLER"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGKILL, "memory limit"),
        (signal.SIGABRT, "assertion"),
        (signal.SIGTERM, "scheduler"),
        (signal.SIGILL, "CPU"),
    ],
)
def test_a_signal_gets_another_hint(number: signal.Signals, word: str) -> None:
    assert word in hint(FAILURE._replace(kind=FailureKind.SIGNAL, exception=None, status=ExitStatus(signal=number)))


def test_an_unknown_signal_gets_a_hint() -> None:
    assert hint(FAILURE._replace(kind=FailureKind.SIGNAL, exception=None, status=ExitStatus(signal=40))) == ""


@pytest.mark.parametrize(
    ("code", "finalized", "program", "word"),
    [
        (3, True, ProgramKind.SCRIPT, "sys.exit"),
        (2, True, ProgramKind.SCRIPT, "argparse"),
        (3, False, ProgramKind.MODULE, "os._exit"),
        (3, False, ProgramKind.EXECUTABLE, "The program ended by itself"),
    ],
)
def test_an_exit_gets_another_hint(code: int, finalized: bool, program: ProgramKind, word: str) -> None:
    status = ExitStatus(code=code)
    failure = FAILURE._replace(kind=FailureKind.EXIT, exception=None, finalized=finalized, status=status)
    assert word in hint(failure, program)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (FailureKind.OOM_KILL, "lack of memory"),
        (FailureKind.NOT_STARTED, "executable"),
        (FailureKind.INFRASTRUCTURE, "report it"),
    ],
)
def test_a_kind_of_failure_gets_another_hint(kind: FailureKind, word: str) -> None:
    assert word in hint(FAILURE._replace(kind=kind, exception=None))
