"""Post-local SGD: average gradients at first, later only within small groups, and the parameters now and then.

Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .comm_hooks import average
from .grad_bucket import GradBucket


@dataclass
class PostLocalSGDState:
    """How long gradients are averaged over everyone, and over whom afterwards.

    Attributes:
        process_group: all ranks; the default group if ``None``.
        subgroup: averages gradients after the start; ``None``: each rank keeps its own.
        start_local_step: so many steps average over ``process_group``.
        step: steps so far.
    """

    process_group: dist.ProcessGroup | None = None
    subgroup: dist.ProcessGroup | None = None
    start_local_step: int = 100
    step: int = 0


def post_local_sgd_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average over everyone in the first steps, then over the subgroup.

    Parameters drift apart from then on: let a `PeriodicAverage` bring them together.
    """
    is_local = state.step >= state.start_local_step
    if bucket.is_last():
        state.step += 1
    if not is_local:
        return average(bucket.buffer(), state.process_group)
    if state.subgroup is not None:
        return average(bucket.buffer(), state.subgroup)
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class PeriodicAverage:
    """Averages parameters over the ranks every ``period`` steps, from ``warmup_steps`` on.

    Call `step` after each step of the optimizer, with the same number of steps on every rank.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if period < 1:
            raise ValueError(f"period must be at least 1 step, not {period}.")
        self._parameters = list(parameters)
        self._period = period
        self._warmup_steps = warmup_steps
        self._group = process_group
        self._steps = 0

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step; return whether parameters were averaged in it."""
        due = self._steps >= self._warmup_steps and (self._steps - self._warmup_steps) % self._period == 0
        self._steps += 1
        if due:
            for parameter in self._parameters:
                dist.all_reduce(parameter.div_(dist.get_world_size(self._group)), group=self._group)
        return due
