"""Data parallelism in one process: each forward copies the module to every device and cuts the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from .gather import gather
from .parallel_apply import parallel_apply
from .replicate import replicate
from .scatter import scatter

T = TypeVar("T", bound=nn.Module)
DeviceLike = int | str | torch.device


class DataParallel(nn.DataParallel[T], Generic[T]):
    """torch's ``DataParallel`` for any list of devices, the CPU (several times) among them.

    Simple, and one process: every forward copies all parameters, Python threads share one interpreter lock, and the
    optimizer runs once for all (docs/reference/parallel-dp.md has figures). It subclasses torch's class so that
    ``isinstance`` checks know it, and replaces all of its methods; the state dict is torch's, with ``module.``.

    A forward is ``scatter``, ``replicate``, ``parallel_apply``, ``gather``, in this order.

    Args:
        module: on the first device.
        device_ids: accelerators by index, or any devices; all accelerators if ``None``. On a machine without
            accelerators indices mean nothing and the module runs as it is.
        output_device: where outputs are put together; the first of ``device_ids`` if ``None``, -1 is the CPU.
        dim: the batch dimension.
    """

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.dim = dim
        self.devices = _resolved(device_ids)
        self.device_ids = [_index_or_device(device) for device in self.devices]  # type: ignore[misc]
        if not self.devices:
            return
        self.src_device_obj = self.devices[0]
        self.output_device = self.devices[0] if output_device is None else _device(output_device)  # type: ignore[assignment]
        if len(self.devices) == 1:
            self.module.to(self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, each replica on its part of the batch.

        Raises:
            RuntimeError: the module is not on the first device.
        """
        if not self.devices:
            return self.module(*inputs, **kwargs)
        self._check_that_the_module_is_on_the_first_device()
        pieces, kwargs_pieces = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.devices) == 1:
            return self.module(*pieces[0], **kwargs_pieces[0])
        replicas = self.replicate(self.module, self.device_ids[: len(pieces)])
        outputs = self.parallel_apply(replicas, pieces, kwargs_pieces)
        return self.gather(outputs, self.output_device)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Positional and keyword arguments for each device that gets a part; see ``scatter``."""
        if not inputs and not kwargs:
            return ((),), ({},)
        pieces = scatter((inputs, kwargs or {}), [_device(device) for device in device_ids], self.dim)
        return tuple(piece for piece, _ in pieces), tuple(piece for _, piece in pieces)

    def replicate(self, module: T, device_ids: Sequence[DeviceLike]) -> list[T]:
        """One copy of the module for each device; see ``replicate``."""
        return replicate(module, [_device(device) for device in device_ids], not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The replicas' outputs; see ``parallel_apply``."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """The outputs put together; see ``gather``."""
        return gather(outputs, _device(output_device), self.dim)

    def _check_that_the_module_is_on_the_first_device(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{self.src_device_obj} (device_ids[0]) but found one of them on device: {tensor.device}"
                )


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """``module(*inputs, **module_kwargs)`` once, in parallel: the functional form of ``DataParallel``."""
    positional = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*positional, **(module_kwargs or {}))


def _accelerator() -> str | None:
    """The type of this machine's accelerators; ``None`` without any."""
    return next((type_ for type_ in ("cuda", "xpu") if torch.get_device_module(type_).is_available()), None)


def _resolved(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    accelerator = _accelerator()
    if device_ids is None:
        count = torch.get_device_module(accelerator).device_count() if accelerator else 0
        return [torch.device(accelerator or "cpu", index) for index in range(count)]
    if accelerator is None and all(isinstance(device, int) for device in device_ids):
        return []
    return [_device(device) for device in device_ids]


def _device(device: DeviceLike) -> torch.device:
    """A device with its index, except the CPU, as tensors name it."""
    if isinstance(device, int):
        return torch.device("cpu") if device < 0 else torch.device(_accelerator() or "cpu", device)
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)


def _index_or_device(device: torch.device) -> int | torch.device:
    return device if device.index is None or device.type != _accelerator() else device.index
