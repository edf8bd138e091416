"""What the arguments of ``DistributedDataParallel`` mean, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group

from .comm_hooks import Hook, allreduce_hook, fp16_compress_hook


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The group that was given, that of the mesh, or the default one.

    Raises:
        RuntimeError: both were given, or the mesh has several dimensions.
        ValueError: neither was given and there is no default group.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    return process_group if process_group is not None else _get_default_group()


def check_parameters(module: nn.Module, managed: Sequence[nn.Parameter]) -> None:
    """Refuse what cannot be trained in this way.

    Args:
        module: the module.
        managed: its parameters that will be reduced.

    Raises:
        RuntimeError: a parameter has no shape yet, or none needs a gradient.
        ValueError: parameters lie on devices of several types.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                f"Run a dummy forward pass to correctly initialize the modules ({name} is not)."
            )
    if not managed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    types = sorted({parameter.device.type for parameter in managed})
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {types}."
        )


def resolve_device_ids(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    devices: Collection[torch.device],
) -> list[torch.device] | None:
    """The one device that inputs are moved to, or ``None``: inputs stay where they are.

    Raises:
        ValueError: several were given, or one for a module on CPUs or on several devices.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    device_type = next(iter(devices)).type
    if device_type == "cpu" or len(devices) > 1 or not device_ids:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None
    wish = device_ids[0]
    return [wish if isinstance(wish, torch.device) else torch.device(device_type, wish)]


def builtin_hook(kind: Any) -> Hook:
    """The hook that torch's ``BuiltinCommHookType`` means."""
    return {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}[kind.name]
