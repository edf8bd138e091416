"""The same numbers as torch's class and the naive one: long runs, and every data type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dlaunch.parallel import DistributedDataParallel, NaiveDistributedDataParallel

from .ddp_models import Everything, batches, loss_of
from .worlds import WorldOf


def train(model: nn.Module, rank: int, size: int, steps: int) -> list[float]:
    trained = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=0.01)
    losses = []
    for inputs, targets in batches(steps, 4 * size):
        optimizer.zero_grad()
        loss = loss_of(model(inputs[rank::size]), targets[rank::size])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_([p for p in trained if not p.is_complex()], 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fifty_steps(rank: int, size: int, transport: str) -> None:
    torch.manual_seed(0)
    first, second, third = (copy.deepcopy(network) for network in [Everything(sparse=False)] * 3)
    losses = [
        train(model, rank, size, 50)
        for model in (
            DistributedDataParallel(first, transport=transport, bucket_cap_mb=0.0004),
            TorchDDP(second),
            NaiveDistributedDataParallel(third),
        )
    ]
    assert losses[0][-1] < losses[0][0]
    for ours, torchs, naive in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        if size <= 2:
            assert torch.equal(ours, torchs)
            assert torch.equal(ours, naive)
        else:
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours, naive, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "transport"), [(1, "torch"), (2, "torch"), (2, "shared_memory"), (3, "shared_memory")]
)
def test_fifty_steps_end_where_torchs_class_and_the_naive_one_do(world_of: WorldOf, size: int, transport: str) -> None:
    world_of(size).run(fifty_steps, size, transport)


class OneOfEach(nn.Module):
    """A parameter of each data type that can be differentiated; the gradient of each is the input, in its type."""

    TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(37, dtype=dtype)) for dtype in self.TYPES)

    def forward(self, inputs: Tensor) -> Tensor:
        products: Any = sum((value * inputs.to(value.dtype)).sum().to(torch.complex128) for value in self.values)
        total: Tensor = products.real
        return total


def every_type(rank: int, size: int, transport: str) -> None:
    inputs = torch.randn(size, 37, generator=torch.Generator().manual_seed(3))
    ours = DistributedDataParallel(OneOfEach(), transport=transport)
    naive = NaiveDistributedDataParallel(OneOfEach())
    for model in (ours, naive):
        torch.autograd.backward(model(inputs[rank]))
    for mine, other in zip(ours.parameters(), naive.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        if size <= 2:
            assert torch.equal(mine.grad, other.grad)
        # A sum of n terms is off by at most n - 1 roundings, each half a unit in the last place of a partial sum.
        exact = inputs.double().mean(0).to(mine.grad.dtype)
        bound = size * torch.finfo(mine.dtype).eps * inputs.abs().max().item()
        assert (mine.grad - exact).abs().max().item() <= bound, mine.dtype


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_every_data_type_are_averaged(world_of: WorldOf, size: int, transport: str) -> None:
    world_of(size).run(every_type, size, transport)
