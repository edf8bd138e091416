"""What torch's own functions must know of shards, put into them once: optimizers' steps, gradient norms, scalers.

torch calls hooks around the step of any optimizer. Ours frees whole parameters before it, waits until no other rank
reads this rank's rows, and counts the steps that were made. ``torch.nn.utils.clip_grad_norm_`` asks one function for
the norm of its gradients; ours adds up the norms of all ranks' rows if they are rows. ``GradScaler`` asks one of its
methods whether a gradient overflowed; with ours, one rank's overflow is everyone's, so that all leave out the same
steps. So scripts need no functions of ours for any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .clip import clipping_with_norms_of_all_ranks, with_norms_of_all_ranks
from .overflow import with_overflows_of_all_ranks
from .run import Run
from .sharded_parameter import shard_of, whole_of_sharded

_installed = False


def install() -> None:
    """Do it; a second time changes nothing."""
    global _installed  # noqa: PLW0603  -- it is the process that is changed
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_settle)
    register_optimizer_step_post_hook(_count)
    teach_norms(clip_grad, nn.utils)
    GradScaler._unscale_grads_ = with_overflows_of_all_ranks(GradScaler._unscale_grads_)  # type: ignore[method-assign]


def teach_norms(*modules: Any) -> None:
    """Put norms over all ranks into ``clip_grad_norm_``: into the function that it asks, where torch (2.6) has one.

    Args:
        modules: the one that defines ``clip_grad_norm_``, and those that hold it under this name as well, and the
            function that it asks as ``get_total_norm``.
    """
    home = modules[0]
    if hasattr(home, "_get_total_norm"):
        total_norm = with_norms_of_all_ranks(home._get_total_norm)
        home._get_total_norm = total_norm
        for module in modules[1:]:
            if hasattr(module, "get_total_norm"):
                module.get_total_norm = total_norm
        return
    clips = clipping_with_norms_of_all_ranks(home.clip_grad_norm_)
    for module in modules:
        module.clip_grad_norm_ = clips


_WHOLE_MATRICES = {"Adafactor", "LBFGS", "Muon"}  # torch's optimizers whose step on rows is not that on the whole


def _settle(optimizer: Optimizer, *_: Any) -> None:
    name = type(optimizer).__name__
    for parameter in _parameters_of(optimizer):
        shard = shard_of(parameter)
        if shard is None:
            _refuse_whole(parameter)
        elif name in _WHOLE_MATRICES and (unit := shard.unit()) is not None and unit.transport.group is not None:
            raise RuntimeError(
                f"{name} needs whole parameters, and this rank has rows of {shard.name}: use an optimizer that "
                "treats each element on its own, as SGD and Adam do, or DistributedDataParallel."
            )
    for run in _runs_of(optimizer):
        run.settle()


def _count(optimizer: Optimizer, *_: Any) -> None:
    for run in _runs_of(optimizer):
        run.steps += 1


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _runs_of(optimizer: Optimizer) -> list[Run]:
    shards = filter(None, map(shard_of, _parameters_of(optimizer)))
    units = filter(None, (shard.unit() for shard in shards))
    return list({id(unit.run): unit.run for unit in units}.values())


def _refuse_whole(parameter: Tensor) -> None:
    if (sharded := whole_of_sharded(parameter)) is not None:
        raise RuntimeError(
            f"The optimizer holds the whole of {sharded.name}, which exists only while its unit runs. It was made "
            "between a forward and its backward: make it of model.parameters() before the first forward."
        )
