"""``prepare`` in a plain process and in worlds of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlaunch.errors import UsageError
from dlaunch.parallel import DistributedDataParallel, wrapper_of
from dlaunch.parallel.dp.data_parallel import DataParallel
from dlaunch.parallel.scripts.prepare import prepare

from .programs import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs)


def make_parts(batch_size: int = 2) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net().double()
    data = TensorDataset(torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 1, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, batch_size)


def train(model: Any, optimizer: Any, loader: Any) -> Any:
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    return model.state_dict()


def test_without_a_launcher_the_arguments_come_back_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLAUNCH_PARALLEL", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    model, optimizer, loader = make_parts()
    assert prepare(model) is model
    assert prepare(model, optimizer) == (model, optimizer)
    assert prepare(model, optimizer, loader, loader) == (model, optimizer, loader, loader)
    assert prepare(model, loader=loader) == (model, loader)
    assert type(model) is Net and type(loader) is DataLoader and not dist.is_initialized()


def prepare_and_train(rank: int) -> Any:
    model, optimizer, loader = make_parts(batch_size=4 // dist.get_world_size())
    if rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # all ranks get the first one's
    same, same_optimizer, shared = prepare(model, optimizer, loader, way="ddp")
    assert same is model and isinstance(model, Net) and same_optimizer is optimizer
    assert isinstance(wrapper_of(model), DistributedDataParallel) and isinstance(shared, DataLoader)
    assert len(shared) == 4
    return train(model, optimizer, shared)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_train_as_one_process_with_the_whole_batch_does(world_of: Any, size: int) -> None:
    expected = train(*make_parts(batch_size=4))
    for state in world_of(size).run(launched, prepare_and_train):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name])


def launched(rank: int, function: Any) -> Any:
    """As under a launcher, in a world that has its process group already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        return function(rank)


def seeds_differ(rank: int) -> Any:
    torch.manual_seed(rank)
    model, _, _ = make_parts()
    data = TensorDataset(torch.arange(12))
    torch.manual_seed(100 + rank)
    _, loader = prepare(model, loader=DataLoader(data, 2, shuffle=True))
    return [int(item) for (batch,) in loader for item in batch]


def test_ranks_with_different_seeds_shuffle_with_the_first_ranks(world_of: Any) -> None:
    first, second = world_of(2).run(launched, seeds_differ)
    assert sorted(first + second) == list(range(12)) and sorted(first) != first


def accumulate(rank: int) -> Any:
    model, _, _ = make_parts()
    model = prepare(model, find_unused_parameters=True)
    wrapper: Any = wrapper_of(model)
    assert wrapper.find_unused_parameters
    with wrapper.no_sync():
        model(torch.full((1, 4), float(rank), dtype=torch.float64)).sum().backward()
    alone = model.layers[0].weight.grad.clone()
    model(torch.zeros(1, 4, dtype=torch.float64)).sum().backward()
    return alone, model.layers[0].weight.grad.clone()


def test_options_reach_the_wrapper_and_no_sync_works_through_it(world_of: Any) -> None:
    (alone0, averaged0), (alone1, averaged1) = world_of(2).run(launched, accumulate)
    assert not torch.equal(alone0, alone1) and torch.equal(averaged0, averaged1)


def test_a_whole_script_runs_alone_and_in_a_world_of_its_own(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
from dlaunch.parallel.scripts.prepare import prepare

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.arange(36.0).reshape(12, 3), batch_size=2, shuffle=True)
model, optimizer, loader = prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
print(len(loader), sorted(model.state_dict()), dist.is_initialized())
"""
    (alone,) = run_ranks(script, tmp_path, launched=False)
    assert alone.stdout == "6 ['bias', 'weight'] False\n", alone.stderr
    for result in run_ranks(script, tmp_path, 2, variables={"DLAUNCH_PARALLEL": "ddp"}):
        assert (result.returncode, result.stdout) == (0, "3 ['bias', 'weight'] True\n"), result.stderr


def test_data_parallel_is_one_process_and_its_loader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLAUNCH_PARALLEL", "dp")
    monkeypatch.delenv("RANK", raising=False)
    expected = train(*make_parts())
    model, optimizer, loader = prepare(*make_parts(), device="cpu", device_ids=["cpu", "cpu"])
    assert isinstance(wrapper_of(model), DataParallel) and type(loader) is DataLoader
    for name, value in train(model, optimizer, loader).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second kind of device")
def test_an_optimizers_state_follows_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    model, optimizer, loader = make_parts()
    train(model, optimizer, loader)
    prepare(model, optimizer, way="dp", device="cuda:0")
    states = list(optimizer.state.values())
    assert states and all(state["momentum_buffer"].is_cuda for state in states)
    assert all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ("model",), "takes an nn.Module, not a str"),
        (lambda: (nn.DataParallel(Net()),), "wrapped already"),
        (lambda: (DataParallel(Net(), ["cpu"]),), "wrapped already"),
        (lambda: (prepare(Net(), way="dp", device_ids=["cpu"]),), "wrapped already"),
        (lambda: (nn.LazyLinear(2),), "uninitialized parameters"),
        (lambda: (nn.Linear(2, 2, device="meta"),), "on the meta device"),
        (lambda: (frozen(),), "no parameter of the model needs a gradient"),
        (lambda: (Net(), torch.optim.SGD(Net().parameters())), "holds no parameter of the model"),
        (lambda: (Net(), "optimizer"), "takes a torch Optimizer, not a str"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_sentence(make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as raised:
        prepare(*make(), way="dp", device="cpu", device_ids=["cpu"])
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(UsageError, match="is a ScriptModule"):
        prepare(torch.jit.script(nn.Linear(2, 2)), way="dp")


def prepare_a_list(rank: int) -> None:
    with pytest.raises(UsageError, match="takes torch DataLoaders, not a list"):
        prepare(make_parts()[0], loader=[1, 2])  # type: ignore[arg-type]


def test_a_loader_that_is_none_is_refused(world_of: Any) -> None:
    world_of(1).run(launched, prepare_a_list)
