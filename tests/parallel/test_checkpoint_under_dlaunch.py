"""A checkpoint on demand through the launcher: SIGUSR1 to dlaunch, a checkpoint of the same step from all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlaunch.parallel import checkpoint

SCRIPT = """
import sys
import torch.distributed as dist
from dlaunch.parallel import checkpoint

request = checkpoint.CheckpointRequest()
dist.init_process_group("gloo")
step = 0
dist.barrier()
print("training", flush=True)
while not request.requested():
    step += 1
saver = checkpoint.Saver(sys.argv[1], background=False)
saver.save({"step": step}, step, sharded={"step": step})
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_a_signal_to_dlaunch_makes_all_ranks_save_after_the_same_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "dlaunch", "run", "--nproc-per-node", "2", str(script), str(tmp_path / "saved")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        output = ""
        try:
            while output.count("training") < 2:
                line = running.stdout.readline()
                assert line, output
                output += line
            os.kill(running.pid, signal.SIGUSR1)
            output += running.communicate(timeout=90)[0]
        finally:
            running.terminate()
    assert running.returncode == 0, output
    found = checkpoint.latest(tmp_path / "saved")
    assert found is not None
    assert [found.read_shard(rank)["step"] for rank in range(2)] == [found.step] * 2
