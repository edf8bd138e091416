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

    def prepare(self, module: nn.Module) -> None:
        """Let modules that run again in a backward (activation checkpointing) find ``param_dtype`` there too."""
        if self.param_dtype is None:
            return
        for submodule in module.modules():
            if any(parameter.is_floating_point() for parameter in submodule.parameters(recurse=False)):
                narrowed = _Narrowed(self)
                submodule.register_forward_pre_hook(narrowed.enter)
                submodule.register_forward_hook(narrowed.leave, always_call=True)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module in ``param_dtype``. Autograd sees the casts, so gradients arrive in full precision."""
        if self.param_dtype is None:
            return module(*args, **kwargs)
        sparse = set(sparse_parameter_ids(module))
        narrow = {
            name: self.cast(parameter, sparse=id(parameter) in sparse) for name, parameter in module.named_parameters()
        }
        args, kwargs = tree_map_only(Tensor, self.cast, (args, kwargs))
        return functional_call(module, narrow, args, kwargs)

    def cast(self, tensor: Tensor, sparse: bool = False) -> Tensor:
        """In ``param_dtype``, if it is of a floating-point type; ``sparse``: its gradient may be so."""
        if not tensor.is_floating_point():
            return tensor
        if sparse:
            narrowed: Tensor = _CastKeepingLayout.apply(tensor, self.param_dtype)  # type: ignore[no-untyped-call]
            return narrowed
        return tensor.to(self.param_dtype)


class _Narrowed:
    """Puts casts in the place of one module's own parameters while it runs, where they are not narrow already."""

    def __init__(self, policy: MixedPrecision) -> None:
        self._policy = policy
        self._kept: list[dict[str, nn.Parameter]] = []  # one for each run that has not ended: modules may be nested

    def enter(self, module: nn.Module, _: Any) -> None:
        """Before the module runs."""
        sparse = bool(getattr(module, "sparse", False))
        wide = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != self._policy.param_dtype
        }
        self._kept.append(wide)
        for name, parameter in wide.items():
            module._parameters[name] = self._policy.cast(parameter, sparse)  # type: ignore[assignment]

    def leave(self, module: nn.Module, *_: Any) -> None:
        """After the module has run or raised."""
        if self._kept:
            module._parameters.update(self._kept.pop())


class _CastKeepingLayout(torch.autograd.Function):
    """A cast whose gradient may be sparse; that of ``Tensor.to`` may not (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
