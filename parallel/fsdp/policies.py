"""Data types and places: what of a unit is computed, summed and kept in which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Data types of floating-point tensors; ``None`` leaves them as they are. torch's policy of this name works too.

    Attributes:
        param_dtype: of whole parameters and inputs in forward and backward. Shards, their gradients and the optimizer's
            state keep their own type.
        reduce_dtype: in which gradients are summed; ``param_dtype`` if ``None``.
        output_dtype: to which a unit's outputs are cast.
        cast_forward_inputs: whether inputs are cast to ``param_dtype``.
        buffer_dtype: to which buffers are cast once.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, policy: Any) -> MixedPrecisionPolicy:
        """Take ours, FSDP2's ``MixedPrecisionPolicy``, FSDP1's ``MixedPrecision``, or none."""
        if policy is None or isinstance(policy, cls):
            return policy or cls()
        casts = getattr(policy, "cast_forward_inputs", True)
        return cls(
            policy.param_dtype,
            policy.reduce_dtype,
            getattr(policy, "output_dtype", None),
            casts,
            getattr(policy, "buffer_dtype", None),
        )

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a parameter kept in ``dtype`` is whole."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a gradient of type ``dtype`` is summed."""
        return self.reduce_dtype if self.reduce_dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Shards, gradients and the optimizer's step stay where the module is computed."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and the optimizer's step are kept in host memory."""

    pin_memory: bool = True


def offloads(policy: Any) -> bool:
    """Whether a policy of ours or of torch's keeps shards in host memory."""
    return type(policy).__name__ == "CPUOffloadPolicy" or bool(getattr(policy, "offload_params", False))
