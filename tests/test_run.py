"""The whole command on one node, with plain interpreters: what a user sees of success, failure, restarts, signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
Write = Callable[..., str]
EXEC = ("--start-method", "exec")


def test_workers_run_with_their_ranks_and_the_run_succeeds_silently(job: Start, script: Write) -> None:
    path = script("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])")
    done = job(*EXEC, "--nproc-per-node", "3", path, "--lr", "0.1", "-t", "3", "--help").end()
    assert done.exit_code == 0
    assert sorted(done.stdout.splitlines()) == [f"0:{r} {r} 3 ['--lr', '0.1', '-t', '3', '--help']" for r in range(3)]
    assert done.stderr == ""


def test_the_environment_is_torchruns(job: Start, script: Write) -> None:
    path = script(
        """
        import json, os
        names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK "
                 "ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
                 "TORCHELASTIC_RUN_ID OMP_NUM_THREADS TORCH_NCCL_ASYNC_ERROR_HANDLING").split()
        print(json.dumps({name: os.environ.get(name) for name in names}))
        print([name for name in os.environ if name.startswith("_DLAUNCH")])
        """
    )
    done = job(*EXEC, "--rdzv-id", "exp7", "--max-restarts", "3", path).end()
    document, private = done.stdout.splitlines()
    assert json.loads(document) == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "exp7",
        "OMP_NUM_THREADS": None,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert private == "[]"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(42)", 42),
        ("sys.exit('no')", 1),
        ("os._exit(7)", 7),
        ("raise ValueError('no')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os.abort()", 134),
    ],
)
def test_the_exit_code_is_the_workers_own(job: Start, script: Write, end: str, code: int) -> None:
    path = script(f"import os, resource, signal, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {end}")
    assert job(*EXEC, path).end().exit_code == code


def test_a_failure_restarts_the_group_until_it_succeeds(job: Start, script: Write) -> None:
    path = script(
        """
        import os, signal, sys, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt, "port", os.environ["MASTER_PORT"])
        if attempt < 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt < 2:
            time.sleep(600)
        """
    )
    run = job(*EXEC, "--nproc-per-node", "2", "--max-restarts", "3", path)
    done = run.end()
    assert done.exit_code == 0
    assert [f"restart {n} of 3" in done.stderr for n in (1, 2, 3)] == [True, True, False]
    assert "0:0 attempt 2" in done.stdout
    assert "attempt 0" in run.log(1, attempt=0)  # rank 0 may have been stopped before it spoke
    assert "attempt 2" in run.log(1, attempt=2)
    assert run.record()["state"] == "succeeded"


def test_the_report_names_the_first_failure_with_the_scripts_own_frames(job: Start, script: Write) -> None:
    path = script(
        """
        import os, time

        def deep():
            raise ValueError("the reason")

        if os.environ["RANK"] == "1":
            print("last words")
            deep()
        time.sleep(600)
        """
    )
    done = job(*EXEC, "--nproc-per-node", "2", path).end()
    report = done.stderr.split("Traceback", 1)[1].partition("ValueError: the reason\n")[2]
    assert done.exit_code == 1
    assert len(report.splitlines()) <= 20
    for text in ("rank 1", "ValueError", "the reason", "train.py", "deep", "stderr.log"):
        assert text in report
    assert "sitecustomize" not in done.stderr
    assert "dlaunch/" not in done.stderr


def test_ctrl_c_ends_the_run_with_130(job: Start, script: Write) -> None:
    path = script("import signal; print('ready'); signal.pause()")
    run = job(*EXEC, path)
    run.line("ready")
    run.signal(signal.SIGINT)
    assert run.end().exit_code == 130


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_workers_and_is_told_by_the_exit_code(job: Start, script: Write, signum: int) -> None:
    path = script(
        """
        import signal, sys
        def stop(number, frame):
            print("caught", number); sys.exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, stop)
        print("ready")
        while True:
            signal.pause()
        """
    )
    run = job(*EXEC, "--nproc-per-node", "2", path)
    for rank in (0, 1):
        run.line(f"0:{rank} ready")
    run.signal(signum)
    done = run.end()
    assert done.exit_code == 128 + signum
    assert sorted(line for line in done.stdout.splitlines() if "caught" in line) == [
        f"0:{rank} caught {signum}" for rank in (0, 1)
    ]


def test_a_second_ctrl_c_kills_workers_that_ignore_the_first(job: Start, script: Write) -> None:
    path = script(
        "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('no')); print('ready')\n"
        "while True: time.sleep(1)"
    )
    run = job(*EXEC, "--grace", "500", path)
    run.line("ready")
    run.signal(signal.SIGINT)
    run.line("no")
    run.signal(signal.SIGINT)
    assert run.end().exit_code == 130


def test_the_grace_is_honoured_when_a_peer_failed(job: Start, script: Write) -> None:
    path = script(
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready")
            time.sleep(600)
        sys.stdin.read()
        time.sleep(1)
        sys.exit(3)
        """
    )
    done = job(*EXEC, "--nproc-per-node", "2", "--grace", "0.5", path).end()
    assert done.exit_code == 3
    assert "rank 0 did not stop within 0.5 s: killed" in done.stderr


def test_user_signals_reach_handlers_and_end_nothing(job: Start, script: Write) -> None:
    path = script(
        """
        import os, signal, sys
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGUSR1, lambda *_: print("got it"))
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
        print("ready")
        while True:
            signal.pause()
        """
    )
    run = job(*EXEC, "--nproc-per-node", "2", path)
    for rank in (0, 1):
        run.line(f"0:{rank} ready")
    run.signal(signal.SIGUSR1)
    run.line("0:0 got it")
    run.signal(signal.SIGUSR2)
    done = run.end()
    assert done.exit_code == 0
    assert "SIGUSR1 was not passed to rank 1" in done.stderr


def test_hangup_stays_ignored_under_nohup(job: Start, script: Write) -> None:
    path = script(
        """
        import signal, sys, time
        print("ignored", signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
        print("ready")
        time.sleep(600)
        """
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = job(*EXEC, path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.line("ignored") == "ignored True"
    run.line("ready")
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGUSR1)
    assert run.end().exit_code == 0


FAMILY = """
    import os, subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    print("ready")
    time.sleep(600)
"""


def pids_of(run: Any) -> dict[str, int]:
    """The guard and the starter below the agent, by their parents."""
    parents = {}
    for pid in run.processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        parents[pid] = int(fields[1])
    (guard,) = [pid for pid, parent in parents.items() if parent == run.pid]
    (starter,) = [pid for pid, parent in parents.items() if parent == guard]
    return {"agent": run.pid, "guard": guard, "starter": starter}


@pytest.mark.parametrize(
    "victims", [("agent",), ("agent", "starter"), ("agent", "guard"), ("guard", "starter")], ids="+".join
)
def test_nothing_outlives_a_kill_of_those_above_it(job: Start, script: Write, victims: tuple[str, ...]) -> None:
    run = job(*EXEC, "--nproc-per-node", "2", script(FAMILY))
    for rank in (0, 1):
        run.line(f"0:{rank} ready")
    pids = pids_of(run)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):  # it may have ended because of the one before
            os.kill(pids[victim], signal.SIGKILL)
    run.end()
    run.nothing_left()


@pytest.mark.parametrize("victim", ["starter", "guard"])
def test_the_job_goes_on_when_a_process_of_our_own_is_killed(job: Start, script: Write, victim: str) -> None:
    path = script(
        """
        import os, time
        print("ready in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        """
    )
    run = job(*EXEC, "--max-restarts", "1", path)
    run.line("attempt 0")
    os.kill(pids_of(run)[victim], signal.SIGKILL)
    run.line("attempt 1")
    assert run.end().exit_code == 0


def test_what_a_worker_leaves_behind_is_gone_before_the_next_attempt(job: Start, script: Write) -> None:
    path = script(
        """
        import os, pathlib, signal, subprocess, sys
        note = pathlib.Path("child.pid")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            note.write_text(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        print("alive" if pathlib.Path("/proc", note.read_text()).exists() else "gone")
        """
    )
    done = job(*EXEC, "--max-restarts", "1", path).end()
    assert (done.exit_code, done.stdout) == (0, "gone\n")


def test_a_program_that_is_not_python_runs_as_it_is(job: Start) -> None:
    done = job("--no-python", "--nproc-per-node", "2", "/bin/sh", "-c", 'echo "$RANK of $WORLD_SIZE"; exit $RANK').end()
    assert sorted(done.stdout.splitlines()) == ["0:0 0 of 2", "0:1 1 of 2"]
    assert done.exit_code == 1


def test_local_rank_is_expanded_in_arguments_and_handed_over_when_asked(job: Start, script: Write) -> None:
    path = script("import sys; print(sys.argv[1:])")
    done = job(*EXEC, "--nproc-per-node", "2", "--no-use-env", path, "gpu${local_rank}", "$$x").end()
    assert sorted(done.stdout.splitlines()) == [f"0:{n} ['--local-rank={n}', 'gpu{n}', '$x']" for n in (0, 1)]


def test_the_same_mistake_in_every_attempt_ends_the_run_early(job: Start, script: Write) -> None:
    done = job(*EXEC, "--max-restarts", "50", script("raise ValueError('always')")).end()
    assert done.exit_code == 1
    assert "a mistake in the script" in done.stderr
    assert "restart 3 of 50" not in done.stderr


def test_no_restart_budget_is_spent_by_an_interrupt_in_the_backoff(job: Start, script: Write) -> None:
    path = script("import os; os._exit(5)")
    run = job(*EXEC, "--max-restarts", "5", "--backoff", "300", path)
    assert run.process.stderr
    while b"restart 1 of 5" not in run.process.stderr.readline():
        pass
    run.signal(signal.SIGTERM)
    assert run.end().exit_code == 143


def test_an_error_in_a_console_of_the_script_is_not_its_end(job: Start, script: Write) -> None:
    """Consoles leave their errors where uncaught exceptions stand; the others must not be stopped for that."""
    path = script(
        """
        import code, os, pathlib, time
        if os.environ["RANK"] == "0":
            code.InteractiveInterpreter(globals()).runcode(compile("1/0", "<console>", "exec"))
        else:
            time.sleep(1)
            print("the other one ends by itself")
        """
    )
    done = job(*EXEC, "--nproc-per-node", "2", path).end()
    assert done.exit_code == 0
    assert "the other one ends by itself" in done.stdout
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("way", ["script", "module"])
def test_the_others_are_not_left_to_find_out_that_a_peer_has_failed(job: Start, script: Write, way: str) -> None:
    path = script(
        """
        import atexit, os, signal, sys, time
        if os.environ["RANK"] == "1":
            atexit.register(lambda: print("cleaned up"))
            raise ValueError("the reason")
        signal.signal(signal.SIGTERM, lambda *_: (print("stopped in time"), sys.exit(0)))
        time.sleep(600)
        """
    )
    program = [path] if way == "script" else ["-m", "train"]
    done = job(*EXEC, "--nproc-per-node", "2", *program).end()
    assert done.exit_code == 1
    assert "0:1 cleaned up" in done.stdout
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_a_closed_standard_descriptor_is_not_taken_by_a_pipe_of_ours(job: Start, script: Write, closed: str) -> None:
    path = script(
        "import pathlib; pathlib.Path('ran').write_text('x'); print('out'); import sys; print('err', file=sys.stderr)"
    )
    shell = f'exec "$0" -m dlaunch --start-method exec "$1" {closed}>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, path],
        check=False,
        cwd=Path(path).parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert (Path(path).parent / "ran").exists()
    assert done.stdout == ("" if closed == "1" else "out\n")
    assert done.stderr == ("" if closed == "2" else "err\n")
