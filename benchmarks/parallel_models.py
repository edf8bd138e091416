"""Models for the comparison of data-parallel classes: compute-bound, mixed, and bound by communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 2048
CONTEXT = 64


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, channels_in, height, width)`` to ``(batch, channels_out, height / stride, width / stride)``."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 3 x 32 x 32 and ten classes; 11.2 million parameters."""
    blocks = []
    channels = 64
    for width, stride in [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]:
        blocks.append(ResidualBlock(channels, width, stride))
        channels = width
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class GPT(nn.Module):
    """A small decoder: six layers of width 256, four heads; 5.3 million parameters, embedding and head tied."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(batch, CONTEXT)`` to logits of shape ``(batch * CONTEXT, VOCABULARY)``."""
        hidden = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits.flatten(0, 1)


def mlp() -> nn.Module:
    """Eight layers of 2048 x 2048: 33.6 million parameters for little computation."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())))


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)


def text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (8, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 2048, generator=generator), torch.randint(2048, (16,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Any, Any]]]] = {
    "gpt": (GPT, text),
    "resnet": (resnet18, images),
    "mlp": (mlp, vectors),
}
