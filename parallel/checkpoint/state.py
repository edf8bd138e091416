"""From live objects to a tree of plain values in host memory, and back.

What a checkpoint may hold is what ``torch.load(weights_only=True)`` reads: dicts, lists, tuples, sets, strings,
numbers, None, tensors, dtypes and shapes. Anything else would need a pickle that runs code, and is refused when
it is saved, with its place in the tree, rather than when a night's work is to be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .error import CheckpointError
from .names import with_names_of, with_plain_names

State = Mapping[str, Any]
_LEAVES = (bool, int, float, complex, str, torch.Size, torch.dtype, type(None))
_BASES: tuple[type[Any], ...] = (int, float, complex, str)  # what subclasses, such as enums, are turned into


@runtime_checkable
class Stateful(Protocol):
    """A module, optimizer, scheduler, scaler, sampler: whatever knows its own state."""

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over what was saved."""


_WAYS_OUT = {
    "ndarray": "Save torch.from_numpy(...) of it.",
    "bytes": "Save torch.frombuffer(bytearray(...), dtype=torch.uint8) of it.",
}


def snapshot(state: State, *, copy: bool) -> dict[str, Any]:
    """The state as plain values, with every tensor in host memory.

    Args:
        state: a tree whose leaves are values, tensors or ``Stateful`` objects.
        copy: also copy what is in host memory already, so that training may go on while it is written. Tensors that
            are one (tied weights) stay one; a view is copied without the rest of its storage.

    Raises:
        CheckpointError: something in the tree cannot be read back without trusting a pickle.
    """
    taker = _Snapshot(copy)
    taken: dict[str, Any] = taker.take(dict(state), "state")
    taker.wait()
    return taken


class _Snapshot:
    """One walk through a state tree."""

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, Stateful):
            own = value.state_dict()
            return self.take(with_plain_names(own) if isinstance(value, nn.Module) else own, place)
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if type(value) in (list, tuple, set):
            return type(value)(self.take(item, f"{place}[{number}]") for number, item in enumerate(value))
        return _leaf(value, place)

    def _mapping(self, value: Mapping[Any, Any], place: str) -> dict[Any, Any]:
        taken: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            taken[_key(key, place)] = self.take(item, f"{place}[{key!r}]")
        if isinstance(value, OrderedDict) and (versions := getattr(value, "_metadata", None)) is not None:
            taken._metadata = self.take(versions, f"{place}._metadata")  # type: ignore[attr-defined]
        return taken

    def _tensor(self, tensor: Tensor, place: str) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(
                f"{place} is a {type(tensor).__name__}, which is not a whole plain tensor.",
                "Save its full tensor, or each rank's part of it under sharded=.",
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._unusual(tensor.detach(), place)
        tensor = tensor.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._copies or tensor.numel() == 0:
            self._copies[key] = self._on_host(tensor)
        return self._copies[key]

    def _on_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda":
            self._devices.add(tensor.device)
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            return host.copy_(tensor, non_blocking=True)
        is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return tensor.to("cpu", copy=self._copy or is_view)

    def _unusual(self, tensor: Tensor, place: str) -> Tensor:
        if tensor.is_meta:
            raise CheckpointError(f"{place} is on the meta device and has no values.", "Materialise the module first.")
        return tensor.to("cpu", copy=self._copy)

    def wait(self) -> None:
        """Return when all copies have arrived."""
        for device in self._devices:
            torch.cuda.synchronize(device)


def _leaf(value: Any, place: str) -> Any:
    if type(value) in _LEAVES:
        return value
    item: Callable[[], Any] | None = getattr(value, "item", None)
    if type(value).__module__ == "numpy" and callable(item) and getattr(value, "ndim", None) == 0:
        return _leaf(item(), place)
    for base in _BASES:
        if isinstance(value, base):
            return base(value) if base is not str else str.__str__(value)
    fix = _WAYS_OUT.get(type(value).__name__, "Save plain values of it.")
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which "
        "torch.load(weights_only=True) would not read back.",
        fix,
    )


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_key(part, place) for part in key)
    return _leaf(key, f"a key of {place}")


def restore(into: Mapping[str, Any], saved: Mapping[str, Any], place: str = "state") -> None:
    """Give each ``Stateful`` object of the tree ``into`` what was saved under its name.

    Raises:
        CheckpointError: nothing was saved under a name of ``into``, or something there cannot take a state.
    """
    for name, target in into.items():
        where = f"{place}[{name!r}]"
        if name not in saved:
            raise CheckpointError(f"The checkpoint has no {where}.", f"It has {', '.join(map(repr, saved))}.")
        if isinstance(target, nn.Module):
            target.load_state_dict(with_names_of(saved[name], target.state_dict()))
        elif isinstance(target, Stateful):
            target.load_state_dict(saved[name])
        elif isinstance(target, Mapping):
            restore(target, saved[name], where)
        else:
            raise CheckpointError(
                f"{where} is a {type(target).__name__}, which cannot take a state.",
                "Give objects with load_state_dict, and take plain values from the result's state.",
            )
