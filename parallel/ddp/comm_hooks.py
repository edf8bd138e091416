"""Ways to reduce a bucket other than a plain sum: hooks for ``register_comm_hook``.

Each takes a state and a bucket and returns a future of the averaged bucket. A state of ``None`` is the default group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .grad_bucket import GradBucket

Hook = Callable[[Any, GradBucket], "Future[Any]"]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average in the gradients' own data type."""
    return average(bucket.buffer(), process_group)


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average in float16: half the bytes of float32, and 11 bits of precision."""
    return _average_as(torch.float16, bucket, process_group)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average in bfloat16: half the bytes of float32, its range, and 8 bits of precision."""
    return _average_as(torch.bfloat16, bucket, process_group)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the bucket in float16, and cast what it returns back."""
    return _compressed(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the bucket in bfloat16, and cast what it returns back."""
    return _compressed(hook, torch.bfloat16)


def average(tensor: Tensor, process_group: dist.ProcessGroup | None) -> Future[Tensor]:
    """A future of the mean of ``tensor`` over the ranks; ``tensor`` is overwritten."""
    group = process_group if process_group is not None else dist.group.WORLD
    tensor.div_(dist.get_world_size(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future: Future[Tensor] = work.get_future().then(lambda done: _only(done.value()))
    return future


def _average_as(dtype: torch.dtype, bucket: GradBucket, process_group: dist.ProcessGroup | None) -> Future[Tensor]:
    buffer = _as_real(bucket.buffer())
    # Divided first: the sum of what is divided stays in the range of the small type.
    compressed = (buffer / dist.get_world_size(process_group)).to(dtype)
    work = dist.all_reduce(compressed, group=process_group, async_op=True)

    def widen(done: Future[Any]) -> Tensor:
        buffer.copy_(_only(done.value()))
        return bucket.buffer()

    future: Future[Tensor] = work.get_future().then(widen)
    return future


def _compressed(hook: Hook, dtype: torch.dtype) -> Hook:
    def wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(_as_real(buffer).to(dtype))

        def widen(done: Future[Any]) -> Tensor:
            _as_real(buffer).copy_(_only(done.value()))
            return buffer

        return hook(state, bucket).then(widen)

    return wrapped


def _as_real(buffer: Tensor) -> Tensor:
    """A view in real numbers, twice as many for complex ones: a cast would drop the imaginary parts."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _only(value: Tensor | list[Tensor]) -> Tensor:
    """A collective's future holds a list of one tensor, a hook's the tensor."""
    return value[0] if isinstance(value, list | tuple) else value
