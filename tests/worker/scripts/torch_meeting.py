"""Two ranks meet at the store that is served for them, and add up their ranks."""

import os
import sys

import torch
import torch.distributed as dist

if sys.argv[1:] == ["tcp"]:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", address, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
else:
    dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
store = dist.distributed_c10d._get_default_store()
stale = store.check(["left"])
dist.barrier()
store.set("left", "by an earlier round")
print(total.item(), stale, flush=True)
dist.destroy_process_group()
