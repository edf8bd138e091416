"""What stands under torch's FSDP names: ours, with the arguments of torch's and state dicts in torch's forms.

`fully_shard` leaves plain rows in our state dicts; torch's has DTensors there, which ``torch.distributed.checkpoint``
and its ``get_model_state_dict`` understand. So has what is here, for models and for optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..fsdp import FSDPModule, register_fsdp_forward_method
from ..fsdp import FullyShardedDataParallel as _Wrapper
from ..fsdp import fully_shard as _fully_shard
from ..fsdp.fully_shard import run_of
from ..fsdp.refusals import refused
from ..fsdp.state_forms import StateForm, watch_optimizers
from .process_group import device_of_this_process, join_process_group

__all__ = ["FSDPModule", "FullyShardedDataParallel", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

_Module = TypeVar("_Module", bound=nn.Module)


class FullyShardedDataParallel(_Wrapper):
    """Our wrapper; optimizers' own state dicts hold DTensors, as torch's distributed checkpoint expects."""

    @wraps(_Wrapper.__init__)  # type: ignore[misc]  # the same arguments, for those who look
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _show_dtensors(self.module)


def fully_shard(
    module: _Module,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> _Module:
    """Ours with torch's arguments (torch 2.13, distributed/fsdp/_fully_shard/_fully_shard.py).

    Raises:
        UsageError: a list of modules, ``dp_mesh_dims``, cuts along other dimensions than the first, parameters that
            are DTensors already.
    """
    if not isinstance(module, nn.Module):
        raise refused("fully_shard([...]) of several modules")
    if dp_mesh_dims is not None:
        raise refused("fully_shard(dp_mesh_dims=...)")
    if shard_placement_fn is not None and not all(
        _is_first_dimension(shard_placement_fn(p)) for p in module.parameters()
    ):
        raise refused("fully_shard(shard_placement_fn=...) with another dimension than the first")
    if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        raise refused("fully_shard of parameters that are DTensors (tensor parallelism)")
    device = _device(mesh)
    _fully_shard(
        _placed(module, device),
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        device=device,
    )
    _show_dtensors(module)
    return module


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Nothing: ours has no streams of its own to share."""


def _show_dtensors(module: nn.Module) -> None:
    run_of(module).form = StateForm.DTENSORS
    watch_optimizers()


def _is_first_dimension(placement: Any) -> bool:
    return placement is None or (getattr(placement, "dim", None) == 0 and hasattr(placement, "is_shard"))


def _device(mesh: Any) -> torch.device:
    """Where torch's would compute: on the mesh's kind of device, this process's own."""
    if not dist.is_initialized():
        join_process_group(device_of_this_process())
    if mesh is not None:
        kind = mesh.device_type
    else:
        kind = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu"
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _placed(module: _Module, device: torch.device) -> _Module:
    tensors = [*module.parameters(), *module.buffers()]
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        module.to(device)
    return module
