"""Buffers (running statistics of BatchNorm, for instance) that all ranks should share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from torch.futures import Future


class BufferHookTime(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True)
class BufferHook:
    """The user's way to make buffers agree, in the place of a broadcast."""

    state: Any
    hook: Callable[[Any, dict[str, Tensor]], list[Future[Tensor]] | Future[Tensor] | None]
    when: BufferHookTime

    def run(self, buffers: dict[str, Tensor]) -> None:
        """Call the hook and wait for what it started."""
        futures = self.hook(self.state, buffers)
        if futures is None:
            return
        for future in futures if isinstance(futures, list) else [futures]:
            future.wait()


def shared_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """The buffers by name, without those to be left alone. Looked up anew each time: modules reassign them."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def sparse_parameter_ids(module: nn.Module) -> Iterator[int]:
    """``id`` of each parameter whose gradients will be sparse."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            yield id(submodule.weight)
