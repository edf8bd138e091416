"""Small models that between them use every kind of parameter and graph that DDP must cope with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


@dataclass
class Output:
    """What the model returns: tensors in a dataclass, which DDP must look into."""

    main: Tensor
    extra: list[Tensor]


class Everything(nn.Module):
    """Dense, shared, sparse, complex, float64, zero-size, frozen and unused parameters, and running statistics."""

    def __init__(self, *, sparse: bool = True, unused: bool = False, recompute: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3)
        )
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.rotation = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Linear(WIDTH, 3) if unused else None
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Output:
        tokens = (inputs.abs().sum(dim=1) * 10).long() % 11
        hidden = self.tied(inputs) + self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + self._run(block, hidden)
        hidden = self.tied(self.norm(hidden)) + self.frozen
        hidden = torch.view_as_real(hidden * self.rotation).sum(-1)
        return Output(hidden * self.exact, [self.nothing.sum()])

    def _run(self, block: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if self.recompute is None:
            return block(hidden)
        recomputed: Tensor = checkpoint(block, hidden, use_reentrant=self.recompute)
        return recomputed


def loss_of(output: Output, targets: Tensor) -> Tensor:
    """Mean squared error, plus what has no elements."""
    return (output.main - targets).square().mean() + sum(output.extra)


def batches(steps: int, rows: int, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    """``steps`` pairs of inputs and targets, each of shape ``(rows, WIDTH)``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator))
        for _ in range(steps)
    ]
