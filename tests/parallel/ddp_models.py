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


class Squash(nn.Module):
    """Into the unit disk; tanh has poles among the complex numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / (1 + inputs.abs())


class Everything(nn.Module):
    """Dense, shared, sparse, complex, float64, zero-size, frozen and unused parameters, and running statistics."""

    def __init__(
        self,
        *,
        sparse: bool = True,
        unused: bool = False,
        recompute: bool | None = None,
        norm: bool = True,
        dtype: torch.dtype = torch.float32,
        depth: int = 3,
    ) -> None:
        super().__init__()
        real = torch.float32 if dtype.is_complex else dtype  # torch differentiates no complex embedding
        self.embedding = nn.Embedding(11, WIDTH, sparse=sparse, dtype=real)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 9, dtype=dtype),
                Squash() if dtype.is_complex else nn.Tanh(),
                nn.Linear(9, WIDTH, dtype=dtype),
            )
            for _ in range(depth)
        )
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype) if norm else nn.Identity()
        self.rotation = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
        self.unused = nn.Linear(WIDTH, 3) if unused else None
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Output:
        tokens = ((inputs > 0) * torch.arange(1, WIDTH + 1)).sum(dim=1) % 11  # signs outlast a narrower type
        inputs = inputs.to(self.tied.weight.dtype)
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
