"""Guard and starters over the real protocol: starting, ending, signalling, and what is left afterwards (nothing)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from .driver import PATIENCE_S, Driver
from .marked import VARIABLE, marked, wait_until_gone

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("mode", ["warm", "exec"])


def driver_of(tmp_path: Path, mode: str, program: str, **options: object) -> Driver:
    script = tmp_path / "script.py"
    script.write_text(program)
    return Driver(mode, [sys.executable, "-u", str(script)], **options)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 15)", -15), ("1/0", 1)],
)
def test_how_a_worker_ended_is_told_as_it_was(tmp_path: Path, mode: str, program: str, code: int) -> None:
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        assert driver.exit_code(worker) == code


@BOTH
def test_every_worker_gets_its_own_variables_output_and_arguments(tmp_path: Path, mode: str) -> None:
    program = "import os, sys; print(os.environ['RANK'], sys.argv[1:], sys.orig_argv[3:]); print('e', file=sys.stderr)"
    with driver_of(tmp_path, mode, program) as driver:
        command = [sys.executable, "-u", str(tmp_path / "script.py")]
        workers = [
            driver.spawn(environment={"RANK": str(rank)}, arguments=[f"r{rank}"], command=[*command, f"r{rank}"])
            for rank in range(3)
        ]
        for rank, worker in enumerate(workers):
            assert worker.out.all().decode() == f"{rank} ['r{rank}'] ['r{rank}']\n"
            assert worker.err.all() == b"e\n"


def test_a_warm_workers_arguments_can_be_others_than_its_starters(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:], sys.orig_argv[2:])")
    with Driver("warm", [sys.executable, "-u", str(script), "--rank=${local_rank}", "x"]) as driver:
        for arguments in (["--rank=3", "x"], [], ["a", "b", "c"]):
            expected = f"{arguments} {[str(script), *arguments]}\n"
            assert driver.spawn(arguments=arguments).out.all().decode() == expected


def test_a_file_that_a_preloaded_module_opened_stays_open(tmp_path: Path) -> None:
    (tmp_path / "opens.py").write_text("file = open(__file__)\n")
    inherited = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = "import opens; print(opens.file.readline())"
    with driver_of(tmp_path, "warm", program, preload=["opens"], inherited=inherited) as driver:
        assert driver.spawn().out.all() == b"file = open(__file__)\n\n"


@BOTH
def test_signals_reach_the_rank_process_and_only_it(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, signal\n"
        "child = os.fork()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('got it'), os._exit(0 if child else 1)))\n"
        "os.write(1, b'set\\n')\n"
        "while True: signal.pause()\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        worker.out.lines(2)
        driver.ask({"kind": "signal", "id": worker.id, "signal": signal.SIGUSR1})
        assert driver.exit_code(worker) == 0
        (left,) = driver.sweep()
        assert worker.out.all().count(b"got it") == 1
        assert left[0] != driver.starter_pid


@BOTH
def test_a_signal_to_a_worker_that_has_ended_reaches_nobody(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, "pass") as driver:
        ended = driver.spawn()
        assert driver.exit_code(ended) == 0
        driver.ask({"kind": "signal", "id": ended.id, "signal": signal.SIGKILL})
        driver.ask({"kind": "kill", "id": ended.id})
        assert driver.exit_code(driver.spawn()) == 0


@BOTH
def test_kill_ends_the_whole_session_of_a_worker(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, signal\nos.fork(); os.fork()\nos.write(1, b'%d\\n' % os.getpid())\nwhile True: signal.pause()\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        pids = [int(line) for line in worker.out.lines(4)]
        driver.ask({"kind": "kill", "id": worker.id})
        assert driver.exit_code(worker) == -signal.SIGKILL
        assert wait_until_gone(pids) == []
        assert driver.sweep() == []


@BOTH
def test_a_hard_sweep_leaves_nothing_and_names_what_it_killed(mode: str) -> None:
    with Driver(mode, [sys.executable, "-u", str(SCRIPTS / "tree.py")]) as driver:
        worker = driver.spawn()
        pids = [int(line) for line in worker.out.lines(5)]
        driver.ask({"kind": "signal", "id": worker.id, "signal": signal.SIGKILL})
        assert driver.exit_code(worker) == -signal.SIGKILL
        killed = driver.sweep()
        assert sorted(pid for pid, _name in killed) == sorted(pids)
        assert all(name for _pid, name in killed)
        assert wait_until_gone(pids) == []


@BOTH
def test_a_gentle_sweep_asks_before_it_kills(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, signal, sys\n"
        "told, tell = os.pipe()\n"
        "if os.fork(): os.read(told, 1); sys.exit()\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked'), os._exit(0)))\n"
        "os.write(tell, b'.')\n"
        "while True: signal.pause()\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        assert driver.exit_code(worker) == 0
        assert len(driver.sweep(gentle_s=PATIENCE_S)) == 1
        assert worker.out.all() == b"asked\n"


@BOTH
def test_a_gentle_sweep_kills_what_does_not_listen(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork(): sys.exit()\n"
        "while True: signal.pause()\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        assert driver.exit_code(driver.spawn()) == 0
        assert len(driver.sweep(gentle_s=0.1)) == 1


@BOTH
def test_a_gentle_sweep_lets_things_end_by_themselves(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, sys\n"
        "told, tell = os.pipe()\n"
        "if os.fork(): sys.exit()\n"
        "os.close(tell)\n"
        "os.read(told, 1)\n"  # until the parent has ended
        "print('done')\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        assert driver.exit_code(worker) == 0
        assert driver.sweep(gentle_s=PATIENCE_S) == []
        assert worker.out.all() == b"done\n"


@BOTH
def test_a_second_sweep_that_is_hard_hurries_a_gentle_one(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork(): sys.exit()\n"
        "while True: signal.pause()\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        assert driver.exit_code(driver.spawn()) == 0
        driver.ask({"kind": "sweep", "gentle_s": 1e6})
        assert len(driver.sweep()) == 1


@BOTH
def test_a_sweep_lets_the_resource_tracker_clean_up(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, pathlib, signal\n"
        "from multiprocessing import resource_tracker, shared_memory\n"
        "resource_tracker.ensure_running()\n"
        "tracker = pathlib.Path(f'/proc/{resource_tracker._resource_tracker._pid}/cmdline')\n"
        "while b'resource_tracker' not in tracker.read_bytes(): os.sched_yield()\n"  # until it has been executed
        "print(shared_memory.SharedMemory(create=True, size=1000).name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        worker = driver.spawn()
        (name,) = worker.out.lines(1)
        assert driver.exit_code(worker) == -signal.SIGKILL
        assert driver.sweep() == []
        assert not (Path("/dev/shm") / name).exists()


@BOTH
@pytest.mark.parametrize("victims", [["starter"], ["guard"], ["agent"], ["agent", "starter"], ["agent", "guard"]])
def test_nothing_outlives_a_kill_of(mark: str, mode: str, victims: Sequence[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.worker.agent_process", mode, str(SCRIPTS / "tree.py")],
        cwd=ROOT,
        env={**os.environ, VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout
        told = json.loads(agent.stdout.readline())
        everyone = [told["guard"], told["starter"], *told["below"]]
        assert sorted([agent.pid, *everyone]) == sorted(marked(mark))
        for victim in victims:
            with suppress(ProcessLookupError):  # it followed the one before already
                os.kill(agent.pid if victim == "agent" else told[victim], signal.SIGKILL)
        assert wait_until_gone(told["below"]) == []
        agent.kill()
        assert wait_until_gone(everyone) == []
        assert marked(mark) == []


@BOTH
def test_sigterm_to_the_starter_ends_its_workers_and_blames_none_of_them(mode: str) -> None:
    with Driver(mode, [sys.executable, "-u", str(SCRIPTS / "tree.py")]) as driver:
        worker = driver.spawn()
        pids = [int(line) for line in worker.out.lines(5)]
        driver.starter_says("started", worker.id)
        os.kill(driver.starter_pid, signal.SIGTERM)
        assert driver.last_words() == []
        assert os.waitstatus_to_exitcode(driver.guard_says("starter_exited")["status"]) == 128 + signal.SIGTERM
        driver.guard_says("swept")
        assert wait_until_gone(pids) == []


@BOTH
def test_sigterm_to_the_guard_ends_everything(mode: str) -> None:
    with Driver(mode, [sys.executable, "-u", str(SCRIPTS / "tree.py")]) as driver:
        pids = [int(line) for line in driver.spawn().out.lines(5)]
        driver.guard.send_signal(signal.SIGTERM)
        driver.guard_says("starter_exited")
        driver.guard_says("swept")
        assert wait_until_gone([driver.starter_pid, *pids]) == []


@BOTH
def test_starter_and_guard_survive_signals_that_are_aimed_at_the_job(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, "pass") as driver:
        driver.starter_says("ready")
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(driver.starter_pid, signum)
            os.kill(driver.guard.pid, signum)
        assert driver.exit_code(driver.spawn()) == 0


@BOTH
def test_the_guard_tells_of_the_starters_end_and_leaves(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, "pass") as driver:
        driver.starter_says("ready")
        driver.socket.close()
        assert driver.guard_says("starter_exited")["status"] == 0
        driver.guard_says("swept")
        assert driver.guard.wait(PATIENCE_S) == 0


@BOTH
def test_workers_inherit_none_of_our_descriptors(tmp_path: Path, mode: str) -> None:
    program = (
        "import os, stat\n"
        "for fd in sorted(map(int, os.listdir('/proc/self/fd'))):\n"
        "    try: kind = stat.S_IFMT(os.fstat(fd).st_mode)\n"
        "    except OSError: continue\n"
        "    print(fd, stat.filemode(kind)[0], os.get_inheritable(fd))\n"
    )
    with driver_of(tmp_path, mode, program) as driver:
        idle = [driver.spawn(command=["sleep", "1000"]) if mode == "exec" else driver.spawn() for _ in range(2)]
        worker = driver.spawn()
        *low, channel = worker.out.all().decode().splitlines()
        assert low == ["0 c True", "1 p True", "2 p True"]
        number, kind, inheritable = channel.split()
        assert int(number) >= 512
        assert (kind, inheritable) == ("s", "False")
        for process in idle:
            driver.ask({"kind": "kill", "id": process.id})


@pytest.mark.parametrize(
    ("content", "permissions", "sentence"),
    [
        (None, 0, "was not found"),
        ("#!/bin/sh\n", 0o644, "chmod +x"),
        ("#!/no/such/interpreter\n", 0o755, "the interpreter that its first line names does not exist"),
        ("hello\n", 0o755, "needs a first line that names its interpreter"),
    ],
)
def test_a_program_that_cannot_be_executed_gets_one_sentence_with_the_fix(
    tmp_path: Path, content: str | None, permissions: int, sentence: str
) -> None:
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(permissions)
    with Driver("exec") as driver:
        worker = driver.spawn(command=[str(program)], python=False)
        error = driver.starter_says("not_started", worker.id)["error"]
        assert sentence in error
        assert str(program) in error
        assert driver.exit_code(driver.spawn(command=["true"], python=False)) == 0


def test_an_interpreter_that_cannot_be_executed_makes_the_warm_start_refuse(tmp_path: Path) -> None:
    with Driver("warm", [str(tmp_path / "python"), "-u", "script.py"]) as driver:
        refusal = driver.starter_says("refused")
        assert refusal["reason"].endswith("was not found.")
        assert (refusal["module"], refusal["asked"]) == (None, False)
        driver.guard_says("starter_exited")
        driver.guard_says("swept")


def test_a_program_without_python_sees_no_trace_of_ours() -> None:
    with Driver("exec", inherited={"PATH": os.environ["PATH"], "A": "1"}) as driver:
        worker = driver.spawn(command=["env"], environment={"RANK": "0"}, python=False)
        lines = worker.out.all().decode().splitlines()
        assert {line.partition("=")[0] for line in lines} - {"LC_CTYPE"} == {"PATH", "A", "RANK"}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no_such_module", "the module no_such_module of --preload cannot be imported: ModuleNotFoundError"),
        ("broken", "the module broken of --preload cannot be imported: ZeroDivisionError: division by zero"),
        ("leaves", "the module leaves of --preload cannot be imported: SystemExit"),
        ("threaded", "importing threaded starts Python threads"),
        ("torch", "importing torch touches CUDA"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_refused_by_name(tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "broken.py").write_text("1/0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit\n")
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "torch.py").write_text(  # like one that was asked for a device: a fork of it can use CUDA no more
        "import os\nowner = os.getpid()\nclass cuda:\n    is_initialized = lambda: False\n"
        "    _is_in_bad_fork = lambda: os.getpid() != owner\n"
    )
    with driver_of(
        tmp_path, "warm", "pass", preload=["json", module], inherited={**os.environ, "PYTHONPATH": str(tmp_path)}
    ) as driver:
        refusal = driver.starter_says("refused")
        assert words in refusal["reason"]
        assert (refusal["module"], refusal["asked"]) == (module, True)
        driver.guard_says("starter_exited")


def test_what_is_preloaded_is_told_and_is_there(tmp_path: Path) -> None:
    with driver_of(tmp_path, "warm", "import sys; print('ftplib' in sys.modules)", preload=["ftplib"]) as driver:
        assert driver.starter_says("ready")["preloaded"] == ["ftplib"]
        assert driver.spawn().out.all() == b"True\n"


def test_an_interpreter_without_torch_is_a_plain_fork_server(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    inherited = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with driver_of(tmp_path, "warm", "print('ran')", torch=True, inherited=inherited) as driver:
        assert driver.starter_says("ready")["preloaded"] == []
        assert driver.spawn().out.all() == b"ran\n"


def test_a_torch_that_is_broken_is_refused_but_nobody_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open shared object file')\n")
    inherited = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with driver_of(tmp_path, "warm", "print('ran')", torch=True, inherited=inherited) as driver:
        refusal = driver.starter_says("refused")
        assert refusal["reason"] == (
            "the module torch cannot be imported: OSError: libtorch.so: cannot open shared object file."
        )
        assert refusal["asked"] is False
        driver.guard_says("starter_exited")


@BOTH
def test_a_starter_without_torch_declines_to_serve_a_store(tmp_path: Path, mode: str) -> None:
    with driver_of(tmp_path, mode, "pass") as driver:
        driver.ask({"kind": "serve_store", "id": 5, "address": "127.0.0.1", "port": 1, "world_size": 1}, [0])
        assert driver.starter_says("not_started", 5)["error"].endswith(".")
        assert driver.exit_code(driver.spawn()) == 0
