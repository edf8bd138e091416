"""A script's own model and optimizer, sharded where they are: what ``prepare`` does for ``fsdp``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dlaunch.errors import UsageError

from ..fsdp import FSDPModule, by_class, fully_shard
from ..fsdp.fully_shard import run_of
from ..fsdp.sharded_parameter import sharded_before
from ..fsdp.state_forms import StateForm, watch_optimizers
from ..fsdp.wrap_policies import modules_to_shard, repeated_blocks

_OF_DDP = {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}  # nothing to do here


def check_unsharded(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise UsageError for a model that is sharded, or an optimizer whose state is that of whole parameters."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UsageError("the model is sharded already.", "Pass the plain model, once.")
    if optimizer is not None and any(optimizer.state.values()):
        raise UsageError(
            "the optimizer has state of whole parameters.",
            "Call prepare() before its first step, and load its state dict afterwards.",
        )


def shard_in_place(
    model: nn.Module, optimizer: Optimizer | None, device: torch.device, *, auto_wrap_policy: Any = None, **options: Any
) -> nn.Module:
    """Shard the model's repeated blocks, then the model; the optimizer steps on rows from now on.

    State dicts of both hold whole tensors, as before; all ranks make them together. All get the first rank's values.

    Args:
        model: stays the object that it is.
        optimizer: without state; holds the rows in the place of the parameters, in the same groups.
        device: where the model is.
        auto_wrap_policy: which modules become units: a set of classes, or a policy; its repeated blocks if ``None``.
        options: of ``fully_shard``; those of DDP that have no meaning here are left out.

    Raises:
        UsageError: an option that neither has.
    """
    known = set(inspect.signature(fully_shard).parameters) - {"module", "device", "sync_module_states"}
    if unknown := sorted(set(options) - known - _OF_DDP):
        raise UsageError(f"prepare() for fsdp has no option {unknown[0]!r}.", f"It has {', '.join(sorted(known))}.")
    chosen = {name: value for name, value in options.items() if name in known}
    for inner in _units(model, auto_wrap_policy):
        fully_shard(inner, device=device, sync_module_states=True, **chosen)
    fully_shard(model, device=device, sync_module_states=True, **chosen)
    run_of(model).form = StateForm.WHOLE
    watch_optimizers()
    if optimizer is not None:
        hold_rows(optimizer)
    return model


def hold_rows(optimizer: Optimizer) -> None:
    """Exchange parameters for the rows that were made of them, in each group."""
    for group in optimizer.param_groups:
        group["params"][:] = [
            parameter if (sharded := sharded_before(parameter)) is None else sharded.shard
            for parameter in group["params"]
        ]


def _units(model: nn.Module, policy: Any) -> list[nn.Module]:
    if policy is None:
        return [block for block in repeated_blocks(model) if block is not model]
    return modules_to_shard(model, policy if callable(policy) else by_class(policy))
