"""``nodes_steps.py FOLDER``: trains a small model with torch's own DDP over gloo on several nodes, and shows when.

Each process writes a file of its own, ``FOLDER/lives/<pid>``: one line of JSON with the variables that it was given,
then "<seconds on CLOCK_BOOTTIME> <steps done>" after each step and, from a thread, every 20 ms: a worker that waits in
a collective lives too. All ranks end with 0 at the same step, once FOLDER holds ``finish``.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
PAUSE_S = 0.005  # so that a step takes 5 to 10 ms
TICK_S = 0.02
NAMES = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
)
steps = 0


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def begin() -> int:
    """The file, with its first line; each line is one write, so that two threads may write."""
    fresh = FOLDER / "lives" / f".{os.getpid()}"
    life = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    told = {name: os.environ.get(name, "") for name in NAMES}
    os.write(life, (json.dumps(told | {"host": os.uname().nodename, "at": now()}) + "\n").encode())
    fresh.rename(fresh.with_name(str(os.getpid())))
    return life


def note(life: int) -> None:
    os.write(life, b"%.6f %d\n" % (now(), steps))


def tick(life: int) -> None:
    while True:
        note(life)
        time.sleep(TICK_S)


def main() -> None:
    global steps  # noqa: PLW0603  -- the thread tells it
    life = begin()
    threading.Thread(target=tick, args=(life,), daemon=True).start()
    import torch  # noqa: PLC0415  -- after the first line on purpose
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters())
    finish = torch.zeros(())
    while not finish.item():
        optimizer.zero_grad()
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        steps += 1
        note(life)
        finish = torch.tensor(float((FOLDER / "finish").exists()))
        dist.all_reduce(finish)
        time.sleep(PAUSE_S)
    del model  # its reducer holds the process group, whose threads must not meet the end of the interpreter
    dist.destroy_process_group()


main()
