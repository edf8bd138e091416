"""The naive class against one process that sees the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlaunch.parallel import NaiveDistributedDataParallel

from .worlds import WorldOf


class Forked(nn.Module):
    """Two layers, of which the second is used only when asked for, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, use_second: bool = True) -> Tensor:
        outputs: Tensor = self.first(inputs)
        if use_second:
            outputs = self.second(outputs)
        return outputs


def make_batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randn(size, 8, generator=generator)) for _ in range(steps)
    ]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.autograd.backward(functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return {name.removeprefix("module."): value.detach() for name, value in model.state_dict().items()}


def train_on_a_share(rank: int, size: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)  # construction must give all ranks the weights of rank 0
    batches = [(inputs[rank::size], targets[rank::size]) for inputs, targets in make_batches(5, 4 * size)]
    return train(NaiveDistributedDataParallel(Forked()), batches)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_train_on_shares_end_where_one_process_with_the_whole_batch_does(
    world_of: WorldOf, size: int
) -> None:
    torch.manual_seed(0)
    expected = train(Forked(), make_batches(5, 4 * size))
    for state in world_of(size).run(train_on_a_share, size):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def use_second_on_rank_1_only(rank: int) -> tuple[Tensor | None, Tensor | None]:
    network = Forked()
    model = NaiveDistributedDataParallel(network)
    model(torch.ones(2, 8), use_second=rank == 1).sum().backward()
    return network.second.bias.grad, network.never.bias.grad


def test_a_parameter_that_one_rank_used_is_averaged_and_one_that_none_used_is_left_alone(
    world_of: WorldOf,
) -> None:
    for second, never in world_of(2).run(use_second_on_rank_1_only):
        torch.testing.assert_close(second, torch.ones(8), rtol=0, atol=0)  # (0 + 2 rows) / 2 ranks
        assert never is None


def accumulate_then_average(rank: int) -> tuple[Tensor, Tensor]:
    layer = nn.Linear(4, 1, bias=False)
    model = NaiveDistributedDataParallel(layer)
    with model.no_sync():
        model(torch.full((1, 4), float(rank))).sum().backward()
    assert layer.weight.grad is not None
    alone = layer.weight.grad.clone()
    model(torch.full((1, 4), 1.0)).sum().backward()
    return alone, layer.weight.grad


def test_gradients_in_no_sync_are_not_averaged_until_the_next_backward_outside(world_of: WorldOf) -> None:
    for rank, (alone, averaged) in enumerate(world_of(2).run(accumulate_then_average)):
        assert alone.tolist() == [[rank] * 4]
        assert averaged.tolist() == [[1.5] * 4]
