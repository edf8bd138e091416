"""What torch's own functions must know of shards, put into them once: optimizers' steps and gradient norms.

torch calls a hook before the step of any optimizer. Ours frees whole parameters there and waits until no other rank
reads this rank's rows. ``torch.nn.utils.clip_grad_norm_`` asks one function for the norm of its gradients; ours adds
up the norms of all ranks' rows if they are rows. So scripts need no functions of ours for either.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .clip import with_norms_of_all_ranks
from .sharded_parameter import shard_of, whole_of_sharded

_installed = False


def install() -> None:
    """Do it; a second time changes nothing."""
    global _installed  # noqa: PLW0603  -- it is the process that is changed
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_settle)
    clip_grad._get_total_norm = with_norms_of_all_ranks(clip_grad._get_total_norm)


def _settle(optimizer: Optimizer, *_: Any) -> None:
    units = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        shard = shard_of(parameter)
        if shard is None:
            _refuse_whole(parameter)
        elif (unit := shard.unit()) is not None:
            units.append(unit)
    for run in {id(unit.run): unit.run for unit in units}.values():
        run.settle()


def _refuse_whole(parameter: Tensor) -> None:
    if (sharded := whole_of_sharded(parameter)) is not None:
        raise RuntimeError(
            f"The optimizer holds the whole of {sharded.name}, which exists only while its unit runs. It was made "
            "between a forward and its backward: make it of model.parameters() before the first forward."
        )
