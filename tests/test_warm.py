"""The whole command with the warm starter and torch: the worker contract as torch itself reads it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
Write = Callable[..., str]

pytestmark = pytest.mark.torch

TRAINING = """
    import os, sys, time
    import torch, torch.distributed as dist
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert dist.is_torchelastic_launched()
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    if attempt == 1:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}",
                                rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    assert not store.check(["left"]), "a key of an earlier round is visible"
    dist.barrier()
    store.set("left", "behind")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("attempt", attempt, "sum", int(total), "random", torch.randint(2**60, (1,)).item())
    if attempt < 2:
        while True:
            dist.all_reduce(total)
    dist.destroy_process_group()
"""


def test_a_world_meets_again_after_each_kill_on_a_store_of_its_own(job: Start, script: Write) -> None:
    run = job("--nproc-per-node", "2", "--max-restarts", "2", script(TRAINING))
    for attempt in (0, 1):
        for rank in (0, 1):
            assert "sum 2" in run.line(f"0:{rank} attempt {attempt}")
        os.kill(run.record()["workers"]["1"], signal.SIGKILL)
    done = run.end()
    assert done.exit_code == 0, done.stderr
    drawn = [line.split()[-1] for line in done.stdout.splitlines() if "random" in line]
    assert len(drawn) == 6
    assert len(set(drawn)) == 6, "ranks or restarts draw the same numbers"


def test_the_store_that_the_starter_serves_may_die_too(job: Start, script: Write) -> None:
    path = script(
        """
        import os, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        """
    )
    run = job("--nproc-per-node", "2", "--max-restarts", "1", path)
    for rank in (0, 1):
        run.line(f"0:{rank} attempt 0")
    record = run.record()
    (store,) = set(run.processes()) - {
        run.pid,
        record["starter"],
        parent(record["starter"]),
        *record["workers"].values(),
    }
    os.kill(store, signal.SIGKILL)
    run.line("0:1 attempt 1")
    done = run.end()
    assert done.exit_code == 0
    assert "the workers' store died" in done.stderr


def test_torchs_own_record_still_works(job: Start, script: Write) -> None:
    path = script(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise KeyError("recorded")

        main()
        """
    )
    run = job(path)
    done = run.end()
    assert done.exit_code == 1
    (file,) = run.log_dir.glob("*/attempt_0/0/error.json")
    message = json.loads(file.read_text())["message"]
    assert "recorded" in message["message"]
    assert "py_callstack" in message["extraInfo"]
    assert "KeyError" in done.stderr


def test_a_module_runs_as_main(job: Start, script: Write, tmp_path: Path) -> None:
    script("print(__name__, __package__, __spec__.name)", "pkg/tool.py")
    script("", "pkg/__init__.py")
    done = job("-m", "pkg.tool").end()
    assert (done.exit_code, done.stdout) == (0, "__main__ pkg pkg.tool\n")


@pytest.mark.parametrize("victims", [("agent",), ("starter",), ("agent", "starter"), ("guard",)], ids="+".join)
def test_nothing_outlives_a_kill_under_the_warm_start(job: Start, script: Write, victims: tuple[str, ...]) -> None:
    path = script(
        """
        import subprocess, sys, time
        from torch.utils.data import DataLoader
        loader = iter(DataLoader(list(range(100)), num_workers=1))
        next(loader)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("ready")
        time.sleep(600)
        """
    )
    run = job("--nproc-per-node", "2", path)
    for rank in (0, 1):
        run.line(f"0:{rank} ready")
    starter = run.record()["starter"]
    pids = {"agent": run.pid, "starter": starter, "guard": parent(starter)}
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):  # it may have ended because of the one before
            os.kill(pids[victim], signal.SIGKILL)
    run.end()
    run.nothing_left()


def test_a_variable_that_the_script_sets_too_late_is_named(job: Start, script: Write) -> None:
    done = job(script("import os; os.environ['OMP_NUM_THREADS'] = '3'")).end()
    assert done.exit_code == 0
    assert "OMP_NUM_THREADS" in done.stderr
    assert "--start-method exec" in done.stderr


def test_a_preload_that_starts_a_thread_is_refused_by_name(job: Start, script: Write) -> None:
    script("import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "noisy.py")
    path = script("print('never')")
    done = job("--preload", "noisy", path, env={"PYTHONPATH": str(Path(path).parent)}).end()
    assert done.exit_code == 78
    assert "noisy" in done.stderr
    assert "never" not in done.stdout


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("method", ["warm", "exec"])
def test_parallel_puts_an_unchanged_script_into_ours(job: Start, script: Write, method: str) -> None:
    path = script(
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(4, 1))
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        print(DDP.__module__, model.module.weight.grad[0, 0].item())
        del model
        dist.destroy_process_group()
        """
    )
    done = job("--start-method", method, "--parallel", "ddp", "--nproc-per-node", "2", path).end()
    assert done.exit_code == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert all(" dlaunch.parallel." in line and line.endswith(" 1.0") for line in lines), lines
    assert len(lines) == 2
