"""Scripts written for torch's classes, run with ours under torch's names, and with torch's: the same numbers.

The scripts have the shapes of torch's documentation (the basic DDP use case, saving and loading checkpoints, the
DataParallel tutorial), in our words.
"""

from __future__ import annotations

from pathlib import Path

from .programs import run_ranks

APPLY = """
import os
from dlaunch.parallel.scripts import patch
patch.apply(os.environ["DLAUNCH_PARALLEL"])
"""

BASIC = """
import torch, torch.distributed as dist, torch.nn as nn, torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(Toy())
loss_fn, optimizer = nn.MSELoss(), optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(5):
    generator = torch.Generator().manual_seed(10 * step + rank)
    optimizer.zero_grad()
    loss_fn(model(torch.randn(20, 10, generator=generator)), torch.randn(20, 5, generator=generator)).backward()
    optimizer.step()
print(type(model).__module__.partition(".")[0], isinstance(model, DDP), isinstance(model, nn.Module))
for key, value in model.state_dict().items():
    print(key, value.double().sum().item())
del model
dist.destroy_process_group()
"""

CHECKPOINT = """
import os, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
ddp_model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
ddp_model(torch.randn(6, 4)).sum().backward()
if rank == 0:
    torch.save(ddp_model.state_dict(), "model.checkpoint")
dist.barrier()
other = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
other.load_state_dict(torch.load("model.checkpoint", map_location="cpu", weights_only=True))
plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
plain.load_state_dict({k.removeprefix("module."): v for k, v in other.state_dict().items()})
print(sorted(other.state_dict()), plain[0].weight.sum().item())
from torch.distributed.checkpoint.state_dict import get_model_state_dict
print(sorted(get_model_state_dict(other)))
del ddp_model, other
dist.destroy_process_group()
"""

DATA_PARALLEL = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
for wrap in (nn.DataParallel, nn.parallel.DataParallel):
    torch.manual_seed(0)
    model = wrap(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.randn(30, 5)), batch_size=10):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    print(type(model).__module__.partition(".")[0], isinstance(model, wrap))
    print(list(model.state_dict()), model.module.weight.double().sum().item())
"""


def outputs(script: str, folder: Path, world_size: int, way: str | None) -> list[list[str]]:
    variables = {} if way is None else {"DLAUNCH_PARALLEL": way}
    results = run_ranks((APPLY if way else "") + script, folder, world_size, variables=variables)
    for result in results:
        assert result.returncode == 0, result.stderr
    return [result.stdout.splitlines() for result in results]


def test_the_basic_use_case_trains_to_the_same_parameters(tmp_path: Path) -> None:
    theirs, ours = (outputs(BASIC, tmp_path, 2, way) for way in (None, "ddp"))
    assert [rank[0] for rank in theirs] == ["torch True True"] * 2
    assert [rank[0] for rank in ours] == ["dlaunch True True"] * 2
    assert ours[0][1:] == ours[1][1:] == theirs[0][1:] and len(ours[0]) == 5


def test_checkpoints_of_the_state_dict_are_the_same(tmp_path: Path) -> None:
    theirs, ours = (outputs(CHECKPOINT, tmp_path, 2, way) for way in (None, "ddp"))
    assert ours == theirs and "module.0.weight" in ours[0][0] and "'0.weight'" in ours[0][1]


def test_the_data_parallel_tutorial_trains_to_the_same_parameters(tmp_path: Path) -> None:
    (theirs,), (ours,) = (outputs(DATA_PARALLEL, tmp_path, 1, way) for way in (None, "dp"))
    assert theirs[0::2] == ["torch True"] * 2 and ours[0::2] == ["dlaunch True"] * 2
    assert ours[1::2] == theirs[1::2] and theirs[1] == theirs[3]
