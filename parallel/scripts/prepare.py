"""``prepare``: a script that knows nothing of processes, made parallel in three lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dlaunch.errors import UsageError
from dlaunch.ways import Way, way_for

from ..collectives import broadcast_object
from ..place import place_of_this_process
from .prepared_loader import prepared_loader, seed_of
from .process_group import device_of_this_process, join_process_group
from .routed_module import RoutedModule, route_through


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: DataLoader[Any] | None = None,
    *more_loaders: DataLoader[Any],
    way: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> Any:
    """The model, optimizer and loaders that the script trains with, for this process of many.

    ``model, optimizer, loader = prepare(model, optimizer, loader)`` is all that a script needs. What comes
    back is the model alone, or a tuple of what was given, in order. Without a launcher that is the arguments
    themselves, untouched.

    The model stays the object that it is: its class, attributes and state dict (without ``module.``) are as before,
    and calling it runs the data-parallel wrapper (``wrapper_of(model)``). It and the batches are moved to this
    process's device. Each loader yields this rank's share; see ``prepared_loader``.

    For ``fsdp`` the model is sharded where it is, its repeated blocks first. Its parameters are rows from then on,
    which the optimizer gets in the place of whole ones, and all ranks make state dicts together.

    Args:
        model: all ranks get the first rank's parameters and buffers.
        optimizer: holds parameters of the model; its state follows them to their device.
        loader: for training.
        more_loaders: for evaluation and the like, treated alike.
        way: ``dp``, ``ddp``, ``fsdp`` or ``none``; what ``--parallel`` says if ``None``, else ``ddp`` under a launcher.
        device: where this process computes; its accelerator by local rank, or the CPU, if ``None``.
        timeout_s: of collectives.
        options: for the wrapper, ``find_unused_parameters=True`` for instance; for ``fsdp`` those of ``fully_shard``
            and ``auto_wrap_policy``.

    Raises:
        UsageError: something cannot be prepared; the sentence says what to do.
    """
    loaders = [given for given in (loader, *more_loaders) if given is not None]
    match way_for(way, os.environ):
        case Way.NONE:
            return _as_given(model, optimizer, loaders)
        case Way.DP:
            _check(model, optimizer)
            _place(model, optimizer, torch.device(device) if device is not None else device_of_this_process())
            return _as_given(route_through(model, partial(_data_parallel, options=options)), optimizer, loaders)
        case Way.FSDP:
            from .shard_in_place import check_unsharded, shard_in_place  # noqa: PLC0415  -- only what is used

            here = torch.device(device) if device is not None else device_of_this_process()
            _check(model, optimizer)
            check_unsharded(model, optimizer)
            join_process_group(here, timeout_s)
            _place(model, None, here)
            sharded = shard_in_place(model, optimizer, here, **options)
            return _as_given(sharded, optimizer, _shared_out(loaders, here))
        case _:
            here = torch.device(device) if device is not None else device_of_this_process()
            _check(model, optimizer)
            join_process_group(here, timeout_s)
            _place(model, optimizer, here)
            routed = route_through(model, partial(_distributed, device=here, options=options))
            return _as_given(routed, optimizer, _shared_out(loaders, here))


def _as_given(model: nn.Module, optimizer: Optimizer | None, loaders: Sequence[DataLoader[Any]]) -> Any:
    rest = ([] if optimizer is None else [optimizer]) + list(loaders)
    return (model, *rest) if rest else model


def _data_parallel(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from ..dp.data_parallel import DataParallel  # noqa: PLC0415  -- only what is used

    return DataParallel(model, **options)


def _distributed(model: nn.Module, device: torch.device, options: dict[str, Any]) -> nn.Module:
    from .. import DistributedDataParallel  # noqa: PLC0415  -- only what is used

    alone = len({parameter.device for parameter in model.parameters()}) == 1
    device_ids = [device] if device.type != "cpu" and alone else None
    wrapper: nn.Module = DistributedDataParallel(model, device_ids=device_ids, **options)
    return wrapper


def _shared_out(loaders: Sequence[DataLoader[Any]], device: torch.device) -> list[DataLoader[Any]]:
    rank, world_size = place_of_this_process()
    for given in loaders:
        if not isinstance(given, DataLoader):
            raise UsageError(f"prepare() takes torch DataLoaders, not a {type(given).__name__}.", "Make one of it.")
    seeds = broadcast_object([seed_of(given) for given in loaders])
    return [
        prepared_loader(given, rank=rank, world_size=world_size, seed=seed, device=device)
        for given, seed in zip(loaders, seeds, strict=True)
    ]


def _place(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Move the model, unless it was spread over several devices, and the optimizer's state after it."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or devices == {device}:
        return
    model.to(device)
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # casts to where the parameters are


def _check(model: nn.Module, optimizer: Optimizer | None) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"prepare() takes an nn.Module, not a {type(model).__name__}.", "Pass the model first.")
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, RoutedModule)
    if isinstance(model, wrappers):
        raise UsageError("the model is wrapped already.", "Pass the plain model, once.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("the model is a ScriptModule.", "Prepare the plain model, before it is scripted or traced.")
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise UsageError("the model has uninitialized parameters.", "Run one batch through it before prepare().")
    if any(tensor.is_meta for tensor in tensors):
        raise UsageError("the model has parameters on the meta device.", "Materialize it with to_empty() first.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model needs a gradient.", "Use it as it is: there is nothing to average.")
    if optimizer is not None:
        _check_optimizer(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"prepare() takes a torch Optimizer, not a {type(optimizer).__name__}.", "Pass it second.")
    mine = {id(parameter) for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not mine & held:
        raise UsageError("the optimizer holds no parameter of the model.", "Make it of model.parameters().")
