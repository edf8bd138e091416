"""How many bytes of tensors live: measured at every operation, by the storages that operations give."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Of all storages of some tensors, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches while it is entered.

    Args:
        known: tensors from before that count too.

    Attributes:
        highest: the most bytes that lived at once, looked at after every operation.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, StorageWeakRef] = {}
        self.highest = 0
        self._see(known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._see(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta)
        self.highest = max(self.highest, self._count())
        return result

    def now(self) -> int:
        """Bytes that live at present."""
        gc.collect()
        return self._count()

    def _see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _count(self) -> int:
        self._alive = {key: seen for key, seen in self._alive.items() if not seen.expired()}  # type: ignore[no-untyped-call]
        total = 0
        for seen in self._alive.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(seen.cdata)
            total += 0 if storage is None else storage.nbytes()
        return total
