"""Small models with what sharding must cope with, and training loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dlaunch.parallel.fsdp import fully_shard

WIDTH = 6


class Block(nn.Module):
    """Two layers with shapes that do not go round, and a parameter without dimensions."""

    up: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(hidden)))
        return hidden + self.scale * change


class BlockList(nn.ModuleList):
    """A list whose items have a type."""

    def __getitem__(self, index: int) -> Block:  # type: ignore[override]
        block = super().__getitem__(index)
        assert isinstance(block, Block)
        return block

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(len(self)))


class Net(nn.Module):
    """Embedding and head tied, blocks, a norm; optionally with more that is hard.

    Args:
        frozen: a frozen block in the middle, and a frozen bias.
        unused: a parameter in a used unit that takes no part.
        recompute: checkpoint the blocks (the value is ``use_reentrant``).
        repeat: how often the first block runs in a forward.
    """

    blocks: BlockList

    def __init__(
        self, *, frozen: bool = False, unused: bool = False, recompute: bool | None = None, repeat: int = 1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = BlockList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(WIDTH, 3) if unused else None
        self.recompute, self.repeat = recompute, repeat
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].get_submodule("up").bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            for _ in range(self.repeat if number == 0 else 1):
                hidden = self._run(block, hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _run(self, block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if self.recompute is None:
            return block(hidden)
        recomputed: Tensor = checkpoint(block, hidden, use_reentrant=self.recompute)
        return recomputed


def net(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def shard_blocks(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batches(steps: int, rows: int, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(11, (rows,), generator=generator), torch.randint(11, (rows,), generator=generator))
        for _ in range(steps)
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    size: int,
    *,
    steps: int = 50,
    clip: float | None = None,
    seed: int = 5,
) -> list[float]:
    """Losses of this rank, which takes every ``size``-th row."""
    losses = []
    for tokens, targets in batches(steps, 4 * size, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens[rank::size]), targets[rank::size])
        torch.autograd.backward(loss)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: int,
    *,
    steps: int = 50,
    clip: float | None = None,
    seed: int = 5,
) -> list[list[float]]:
    """What ``size`` ranks do, done by one process without any of our code: the losses of each rank."""
    losses: list[list[float]] = [[] for _ in range(size)]
    for tokens, targets in batches(steps, 4 * size, seed):
        optimizer.zero_grad()
        for rank in range(size):
            loss = functional.cross_entropy(model(tokens[rank::size]), targets[rank::size])
            torch.autograd.backward(loss)
            losses[rank].append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= size
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return losses


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    """All values within ``bound`` of each other; bit for bit if it is 0."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if bound == 0:
            assert torch.equal(ours[name], value), f"{name}: {(ours[name] - value).abs().max()}"
        else:
            difference = (ours[name] - value).abs().max().item() if value.numel() else 0.0
            assert difference <= bound * max(1.0, value.abs().max().item()), f"{name}: {difference}"
