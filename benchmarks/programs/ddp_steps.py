"""``ddp_steps.py FOLDER [STEPS]``: trains a small model with torch's own DDP over gloo, and notes each event.

Each rank appends lines "<event> <attempt> <pid> <seconds on CLOCK_BOOTTIME>" to ``events_<rank>``: ``first-line``
before anything is imported, ``step`` after each optimizer step, ``holding`` after STEPS steps, if given. It ends when
``finish`` is there; all ranks leave at the same step.
"""

import os
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 0
RANK = int(os.environ["RANK"])
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]


def note(event: str) -> None:
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    with (FOLDER / f"events_{RANK}").open("a") as file:
        file.write(f"{event} {ATTEMPT} {os.getpid()} {at:.6f}\n")


def main() -> None:
    note("first-line")
    import torch  # noqa: PLC0415  -- after the first line on purpose
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters())
    steps, finish = 0, torch.zeros(())
    while not finish.item():
        optimizer.zero_grad()
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        note("step")
        steps += 1
        if steps == STEPS:
            note("holding")
            while not (FOLDER / "finish").exists():
                time.sleep(0.02)
        finish = torch.tensor(float((FOLDER / "finish").exists()))
        dist.all_reduce(finish)
        time.sleep(0.01)
    del model  # its reducer holds the process group, whose threads must not meet the end of the interpreter
    dist.destroy_process_group()


main()
