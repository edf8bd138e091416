"""Values for a model that was built on the meta device: one module at a time is whole, and only its rows are kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .fully_shard import run_of
from .sharded_parameter import ShardedParameter, shard_of


def materialize(model: nn.Module, reset: Callable[[nn.Module], None] | None = None) -> None:
    """Initialise a sharded model in place; all ranks call this together, with random generators in the same state.

    Modules get their values in the order of ``model.modules()``, each by its ``reset_parameters``. For models whose
    parameters are those of torch's layers, built in that order, the values are those of the same model built plainly
    after the same seed. A tied parameter keeps the values that its first module gave it.

    Args:
        model: sharded, with parameters or buffers on the meta device.
        reset: gives a module's own parameters and buffers their values.

    Raises:
        ValueError: a module has no ``reset_parameters`` and ``reset`` was not given.
    """
    run = run_of(model)
    device = run.units[-1].device
    done: set[int] = set()
    for name, module in model.named_modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(tensor is not None and tensor.is_meta for tensor in tensors) or any(
            parameter is not None and id(shard_of(parameter)) in done for parameter in module._parameters.values()
        ):
            _materialize_one(name, module, device, reset or _reset, done)
    for unit in run.units:
        unit.ensure_memory()


def _materialize_one(
    name: str, module: nn.Module, device: torch.device, reset: Callable[[nn.Module], None], done: set[int]
) -> None:
    shards = {key: found for key, p in module._parameters.items() if p is not None and (found := shard_of(p))}
    for key, parameter in module._parameters.items():
        if parameter is not None and (key in shards or parameter.is_meta):
            shape = shards[key].layout.shape if key in shards else parameter.shape
            empty = torch.empty(shape, dtype=parameter.dtype, device=device)
            module._parameters[key] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    try:
        reset(module)
    except AttributeError as error:
        raise ValueError(
            f"{name or 'the root'} is a {type(module).__name__} with parameters or buffers on the meta device and "
            "without reset_parameters(): give materialize(model, reset) a function that sets them"
        ) from error
    for key, shard in shards.items():
        whole = module._parameters[key]
        assert whole is not None
        _keep_rows(shard, whole, done)


def _keep_rows(shard: ShardedParameter, whole: nn.Parameter, done: set[int]) -> None:
    if id(shard) in done:
        shard.show_shard()
        return
    done.add(id(shard))
    begin, end = shard.layout.rows(shard.rank)
    rows = (whole.detach() if whole.dim() else whole.detach().view(1))[begin:end].clone()
    shard.replace(nn.Parameter(rows, requires_grad=shard.shard.requires_grad))


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]
