"""A training script in the shapes of torch's documentation: FSDP1, FSDP2, and one that knows nothing of either.

It is run with torch's classes, and with ours under torch's names, and must print the same. With torch's it leaves out
FSDP1's state dicts, with which torch 2.13 crashes on CPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  -- as everyone writes it
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset

from dlaunch.parallel.scripts.prepare import prepare

OURS = os.environ.get("DLAUNCH_PARALLEL") == "fsdp"
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(hidden)))
        return hidden + change


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Any] | None = None) -> None:
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens, targets = (torch.randint(11, (5,), generator=generator) for _ in range(2))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            clip(0.5)
        optimizer.step()


def show(what: str, state: Mapping[str, Any]) -> None:
    numbers = (f"{name} {value.detach().double().sum().item():.5f}" for name, value in sorted(state.items()))
    print(what, *numbers, flush=True)


def fsdp1() -> None:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    options: dict[str, Any] = {
        "auto_wrap_policy": policy,
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
    }
    model = FSDP(net(), **options)
    optimizer = adam(model)
    train(model, optimizer, model.clip_grad_norm_)
    print("is FSDP", isinstance(model, FSDP))
    with FSDP.summon_full_params(model):
        show("fsdp1", dict(model.named_parameters()))
    if OURS:
        fsdp1_state(model, optimizer, options)


def fsdp1_state(model: FSDP, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig(rank0_only=True)):
        state = model.state_dict()
        moments = FSDP.optim_state_dict(model, optimizer)
    assert bool(state) == bool(moments["state"]) == (dist.get_rank() == 0)
    whole, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    again = FSDP(net(7), **options)
    again.load_state_dict(whole)
    again_optimizer = adam(again)
    again_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(again, again_optimizer, moments))
    train(again, again_optimizer)
    show("ours: fsdp1 goes on", again.state_dict())
    show("ours: generic", get_model_state_dict(again, options=FULL))


def fsdp2(folder: str) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def sharded(model: Net) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy())
        fully_shard(model, mesh=mesh)
        return model

    model = sharded(net())
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Net)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])  # type: ignore[operator]
    optimizer = adam(model)
    train(model, optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
    state: dict[str, Any] = model.state_dict()
    print(sorted({str(value.placements) for value in state.values()}), {v.device_mesh == mesh for v in state.values()})
    show("fsdp2", {name: value.full_tensor() for name, value in state.items()})
    moments: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    show("moments", {name: values["exp_avg"] for name, values in moments["state"].items()})
    parts = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save(parts, checkpoint_id=folder)

    with torch.device("meta"):
        empty = Net()
    again = sharded(empty)
    again.to_empty(device="cpu")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, full if dist.get_rank() == 0 else {}, options=from_first)
    again_optimizer = adam(again)
    set_optimizer_state_dict(again, again_optimizer, moments, options=FULL)
    train(again, again_optimizer)
    show("from whole ones", {name: value.full_tensor() for name, value in again.state_dict().items()})

    third = sharded(net(3))
    held: dict[str, Any] = {"model": get_model_state_dict(third)}
    load(held, checkpoint_id=folder)
    third.load_state_dict(held["model"])
    third_optimizer = adam(third)
    held["optim"] = get_optimizer_state_dict(third, third_optimizer)
    load(held, checkpoint_id=folder)
    set_model_state_dict(third, held["model"])
    set_optimizer_state_dict(third, third_optimizer, held["optim"])
    third_optimizer.load_state_dict(third_optimizer.state_dict())
    train(third, third_optimizer)
    show("from parts", {name: value.full_tensor() for name, value in third.state_dict().items()})


def plain() -> None:
    """Three lines of ours: DDP, or FSDP under ``--parallel fsdp``."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randint(11, (16,), generator=generator) for _ in range(2)))
    model = net()
    optimizer = adam(model)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    for tokens, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    show("prepared", model.state_dict())
    states = optimizer.state_dict()["state"]
    show("its moments", {str(number): values["exp_avg"] for number, values in states.items()})


def main() -> None:
    dist.init_process_group("gloo")
    fsdp1()
    fsdp2(sys.argv[1])
    plain()
    print("ours:", type(net()).__name__, FSDP.__module__.partition(".")[0], fully_shard.__module__.partition(".")[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
