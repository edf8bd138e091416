"""Copying a module to several devices, so that gradients of the copies add up in the original."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

T = TypeVar("T", bound=nn.Module)


def replicate(module: T, devices: Sequence[torch.device], detach: bool = False) -> list[T]:
    """One replica of ``module`` for each device.

    A replica's parameters are not leaves: they were computed from the module's by a copy, and a backward through them
    ends in the module's ``.grad``. The first replica shares its storage with the module, so that what its forward
    writes in place (running statistics, power iterations) stays; what the others write is lost, as in torch.
    Unlike torch's replicas, ``parameters()`` and ``state_dict()`` of ours show their parameters.

    Args:
        module: on ``devices[0]``.
        devices: may name one device several times.
        detach: leave autograd out (nothing will be backpropagated).

    Raises:
        TypeError: a part of the module cannot be copied (compiled, scripted, or lazy and not yet initialised).
    """
    for name, part in module.named_modules():
        _refuse_what_cannot_be_copied(name or "the module", part)
    return [_replica(module, _Copier(device, shares=index == 0, detach=detach)) for index, device in enumerate(devices)]


class _Copier:
    """Makes one replica's tensors; a tensor that the module holds twice is copied once."""

    def __init__(self, device: torch.device, *, shares: bool, detach: bool) -> None:
        self._device = device
        self._shares = shares
        self._detach = detach
        self._copies: dict[int, Tensor] = {}

    def parameter(self, tensor: Tensor) -> Tensor:
        """Connected to the original through autograd, where that has a gradient."""
        if id(tensor) not in self._copies:
            connected = tensor.requires_grad and not self._detach and torch.is_grad_enabled()
            source = tensor if connected else tensor.detach()
            # Not view_as(): with torch 2.13, gradients that reach two leaves through views may come to share storage,
            # and the next backward then adds up in both at once.
            self._copies[id(tensor)] = (
                torch.ops.aten.alias(source) if self._shares else source.to(self._device, copy=True)
            )
        return self._copies[id(tensor)]

    def buffer(self, tensor: Tensor) -> Tensor:
        """The very buffer for the first replica, a copy for the others."""
        return tensor if self._shares and not tensor.requires_grad else self.parameter(tensor)


def _replica(root: T, copier: _Copier) -> T:
    replicas = {part: _shell(part) for part in root.modules()}
    for part, replica in replicas.items():
        for name, child in part._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in part._parameters.items():
            _set_parameter(replica, name, None if parameter is None else copier.parameter(parameter))
        for name, buffer in part._buffers.items():
            replica._buffers[name] = None if buffer is None else copier.buffer(buffer)
        _bind_methods(part, replica)
    return replicas[root]  # type: ignore[return-value]  # a copy has the class of its original


def _shell(part: nn.Module) -> nn.Module:
    """A module like ``part``, made by torch's protocol for it: layers with state of their own override it."""
    shell: nn.Module = part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    return shell


def _set_parameter(replica: nn.Module, name: str, value: Tensor | None) -> None:
    """Through ``setattr`` first: recurrent layers keep their weights a second time and learn of new ones there."""
    if value is not None:
        setattr(replica, name, value)
        vars(replica).pop(name, None)
    replica._parameters[name] = value  # type: ignore[assignment]  # not a leaf, so no nn.Parameter


def _bind_methods(part: nn.Module, replica: nn.Module) -> None:
    """A method that was put onto the instance (``model.forward = MethodType(...)``) would run the original."""
    for name, value in vars(replica).items():
        if isinstance(value, MethodType) and value.__self__ is part:
            vars(replica)[name] = MethodType(value.__func__, replica)


def _refuse_what_cannot_be_copied(name: str, part: nn.Module) -> None:
    if "dynamo_ctx" in vars(part) or getattr(part, "_compiled_call_impl", None) is not None:
        raise TypeError(
            f"{name} is compiled, and its replicas would not use their own parameters: wrap the plain module instead"
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(f"{name} is a ScriptModule, which cannot be replicated: wrap the plain module instead")
    if any(is_lazy(tensor) for tensor in _own_tensors(part)):
        raise TypeError(f"{name} has uninitialized parameters: run one batch through the module before wrapping it")


def _own_tensors(part: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]
