"""Scripts of the shapes that torch documents for DistributedDataParallel, one a function, in our words.

Run on every rank by a launcher, `ddp_examples.py FOLDER`, this writes what each came to, tensors and texts, to
``FOLDER/<rank>.pt``. Nothing here knows of dlaunch: with ``--parallel ddp`` the class of the same name is ours.
"""
# mypy: ignore-errors
# It is written as users write scripts.

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # so do torch's documents
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Found = dict[str, Any]


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


class ToyModelOnTwoDevices(nn.Module):
    def __init__(self, dev0: str, dev1: str) -> None:
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def toy(rank: int) -> ToyModel:
    torch.manual_seed(rank)
    return ToyModel()


def train(model: Any, optimizer: Any, rank: int, steps: int = 4) -> Found:
    loss_fn = nn.MSELoss()
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss_fn(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    return state(model)


def state(model: Any) -> Found:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def basic_use(rank: int) -> Found:
    model = DDP(toy(rank))
    assert isinstance(model, DDP) and isinstance(model.module, ToyModel)
    return train(model, optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rank)


def save_and_load_checkpoints(rank: int) -> Found:
    ddp_model = DDP(toy(rank))
    path = Path("model.checkpoint")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    other = DDP(toy(rank + 7))
    other.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    dist.barrier()
    if rank == 0:
        path.unlink()
    plain = ToyModel()
    plain.load_state_dict({name.removeprefix("module."): value for name, value in other.state_dict().items()})
    found = train(other, optim.SGD(other.parameters(), lr=0.05), rank)
    return found | {"plain": state(plain), "names without a prefix": sorted(get_model_state_dict(other))}


def model_on_two_devices(rank: int) -> Found:
    torch.manual_seed(rank)
    model = DDP(ToyModelOnTwoDevices("cpu", "cpu:0"))
    return train(model, optim.SGD(model.parameters(), lr=0.05), rank)


def join_with_uneven_inputs(rank: int) -> Found:
    model = DDP(toy(rank))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        train(model, optimizer, rank, steps=3 + 2 * rank)
    return state(model)


def join_with_a_sharded_optimizer(rank: int) -> Found:
    model = DDP(toy(rank))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        train(model, optimizer, rank, steps=2 + rank)
    return state(model)


def communication_hooks(rank: int) -> Found:
    def encode_and_decode(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        encoded = bucket.buffer() / dist.get_world_size()
        future = dist.all_reduce(encoded, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def look(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), len(bucket.gradients())))
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    seen: list[tuple[int, bool, int, int]] = []
    hooks: dict[str, tuple[Any, Any]] = {
        "own": (None, encode_and_decode),
        "look": (None, look),
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "fp16 wrapper": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "power sgd": (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    }
    found: Found = {}
    for name, (hook_state, hook) in hooks.items():
        model = DDP(toy(rank))
        model.register_comm_hook(hook_state, hook)
        found[name] = train(model, optim.SGD(model.parameters(), lr=0.05), rank)
    return found | {"buckets": [str(bucket) for bucket in seen]}


def post_local_sgd(rank: int) -> Found:
    model = DDP(toy(rank))
    model.register_comm_hook(
        PostLocalSGDState(None, dist.new_group([rank], use_local_synchronization=True), 2), post_localSGD_hook
    )
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(optim.SGD(model.parameters(), lr=0.05), averager)
    return train(model, optimizer, rank, steps=6)


def synchronised_batch_norm(rank: int) -> Found:
    torch.manual_seed(rank)
    network = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    model = DDP(converted)
    found = state(model) | {"kinds": [type(layer).__name__ for layer in converted]}
    model.eval()  # to train, torch's layer wants accelerators
    return found | {"output": model(torch.ones(2, 10)).detach()}


def compiled(rank: int) -> Found:
    found = {}
    for outside in (False, True):
        torch._dynamo.reset()
        network = toy(rank)
        model: Any = (
            torch.compile(DDP(network), backend="eager") if outside else DDP(torch.compile(network, backend="eager"))
        )
        train(model, optim.SGD(model.parameters(), lr=0.05), rank)
        found[f"outside {outside}"] = state(network)
    return found


def sharded_optimizer(rank: int) -> Found:
    model = DDP(toy(rank))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
    found = train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        found |= {f"state {index}": entry["exp_avg"] for index, entry in optimizer.state_dict()["state"].items()}
    return found


class Recomputed(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.net1, x, use_reentrant=True)
        return self.net2(self.relu(x))


def static_graph(rank: int) -> Found:
    torch.manual_seed(rank)
    model = DDP(Recomputed())
    model._set_static_graph()  # type: ignore[no-untyped-call]
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(20, 10, requires_grad=True)).square().mean().backward()
        optimizer.step()
    return state(model)


def accumulate_without_sync(rank: int) -> Found:
    model = DDP(toy(rank))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    found: Found = {}
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(2):
                model(torch.randn(20, 10)).square().mean().backward()
        found[f"alone {step}"] = model.module.net1.weight.grad.clone()
        model(torch.randn(20, 10)).square().mean().backward()
        optimizer.step()
    return found | state(model)


def gradients_as_views(rank: int) -> Found:
    model = DDP(toy(rank), gradient_as_bucket_view=True, bucket_cap_mb=1)
    found = train(model, optim.AdamW(model.parameters(), lr=0.01), rank)
    return found | {f"gradient {number}": p.grad.clone() for number, p in enumerate(model.parameters())}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.chosen](x)

    chosen = 0


def unused_parameters(rank: int) -> Found:
    torch.manual_seed(rank)
    network = Branches()
    model = DDP(network, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        network.chosen = (step + rank) % 2
        train(model, optimizer, rank + step, steps=1)
    return state(model) | {"without a gradient": [name for name, p in model.named_parameters() if p.grad is None]}


def an_epoch_of_a_sampler(rank: int) -> Found:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(37, 3, 8, 8), torch.randint(4, (37,)))
    sampler = DistributedSampler(data, seed=5)
    torch.manual_seed(rank)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )
    model = DDP(nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in DataLoader(data, batch_size=6, sampler=sampler):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    correct = (model(data.tensors[0]).argmax(1) == data.tensors[1]).sum()
    dist.all_reduce(correct)
    return {"correct": correct} | (state(model) if rank == 0 else {})  # the statistics of others are their own


def autocast_with_a_scaler(rank: int) -> Found:
    model = DDP(toy(rank))
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(20, 10)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return state(model) | {"scale": scaler.get_scale()}


EXAMPLES: list[Callable[[int], Found]] = [
    basic_use,
    save_and_load_checkpoints,
    model_on_two_devices,
    join_with_uneven_inputs,
    join_with_a_sharded_optimizer,
    communication_hooks,
    post_local_sgd,
    synchronised_batch_norm,
    compiled,
    sharded_optimizer,
    static_graph,
    accumulate_without_sync,
    gradients_as_views,
    unused_parameters,
    an_epoch_of_a_sampler,
    autocast_with_a_scaler,
]


def run(rank: int, folder: str) -> dict[str, Any]:
    """All examples in one process group; what raised is told in the place of its result."""
    os.chdir(folder)
    found: dict[str, Any] = {"home of the class": DDP.__module__.partition(".")[0]}
    for example in EXAMPLES:
        try:
            found[example.__name__] = example(rank)
        except Exception as error:  # the others are worth knowing too
            found[example.__name__] = {"raised": f"{type(error).__name__}: {error}"}
        dist.barrier()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(run(rank, sys.argv[1]), f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
