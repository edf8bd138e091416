"""BatchNorm over the batch of all ranks, on any backend (torch's own works on accelerators only).

The statistics of the whole batch are sums over ranks, so one all_reduce in the forward and one in the backward make it
the same as BatchNorm in a single process with the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of inputs ``(rows, features, ...)`` whose mean and variance are those of all ranks' rows.

    In ``eval`` mode with running statistics, and in a world of one, it is plain BatchNorm.

    Args:
        process_group: the ranks; the default group if ``None``. Other arguments are those of ``nn.BatchNorm1d``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def _check_input_dim(self, inputs: Tensor) -> None:
        if inputs.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {inputs.dim()}D input)")

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise; in training every rank of the group must take part, with any number of rows."""
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            outputs: Tensor = super().forward(inputs)
            return outputs
        self._check_input_dim(inputs)
        normalised: Tensor
        normalised, mean, variance, count = _Normalise.apply(inputs, self.eps, self.process_group)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._update_statistics(mean, variance, count)
        shape = _per_feature(inputs)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(inputs.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace each BatchNorm in ``module`` by one of this class with the same parameters and buffers."""
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            converted.training = module.training
            converted._parameters, converted._buffers = module._parameters, module._buffers
            return converted
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)`` with mean and variance over the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        shape = _per_feature(inputs)
        rows = wide.new_full((1,), wide.numel() // max(1, wide.shape[1]))
        sums = torch.cat([wide.sum(dims), rows])
        dist.all_reduce(sums, group=group)
        count = sums[-1]
        mean = sums[:-1] / count
        squares = (wide - mean.view(shape)).square().sum(dims)
        dist.all_reduce(squares, group=group)
        variance = squares / count
        inverse = (variance + eps).rsqrt()
        normalised = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normalised, inverse, count = ctx.saved_tensors
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        shape = _per_feature(gradient)
        features = gradient.shape[1]
        sums = torch.cat([gradient.sum(dims), (gradient * normalised).sum(dims)])
        dist.all_reduce(sums, group=ctx.group)
        mean, projection = (sums / count).split(features)
        inner = gradient - mean.view(shape) - normalised * projection.view(shape)
        return inner * inverse.view(shape), None, None


def _per_feature(tensor: Tensor) -> list[int]:
    return [1, -1, *[1] * (tensor.dim() - 2)]
