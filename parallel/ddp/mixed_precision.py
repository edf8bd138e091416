"""Computing in a narrower data type than the one in which parameters are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from .buffers import sparse_parameter_ids


@dataclass(frozen=True)
class MixedPrecision:
    """Data types of floating-point tensors; ``None`` leaves them as they are.

    Attributes:
        param_dtype: of parameters and inputs while the module runs. Parameters themselves, their gradients and the
            optimizer's state keep full precision, and so do checkpoints.
        reduce_dtype: in which gradients are averaged; ``param_dtype`` if ``None``.
        buffer_dtype: to which buffers are cast once, at construction.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, policy: Any) -> MixedPrecision:
        """Take a policy of ours, torch's private one, or none."""
        if policy is None:
            return cls()
        return cls(policy.param_dtype, policy.reduce_dtype or policy.param_dtype, policy.buffer_dtype)

    def cast_buffers(self, module: nn.Module) -> None:
        """Cast the module's floating-point buffers in place."""
        if self.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.buffer_dtype)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module in ``param_dtype``. Autograd sees the casts, so gradients arrive in full precision."""
        if self.param_dtype is None:
            return module(*args, **kwargs)
        sparse = set(sparse_parameter_ids(module))
        cast_sparse: Any = _CastKeepingLayout.apply
        narrow = {
            name: cast_sparse(parameter, self.param_dtype) if id(parameter) in sparse else self._cast(parameter)
            for name, parameter in module.named_parameters()
        }
        args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        return functional_call(module, narrow, args, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor


class _CastKeepingLayout(torch.autograd.Function):
    """A cast whose gradient may be sparse; that of ``Tensor.to`` may not (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
