"""One parameter: the rows that this rank keeps, and the whole that modules see while their unit runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .shard_layout import ShardLayout

if TYPE_CHECKING:
    from .unit import Unit


@dataclass(frozen=True, slots=True)
class Place:
    """A module and the name under which it holds a parameter; a tied one has several."""

    module: nn.Module
    name: str


class ShardedParameter:
    """Swaps a parameter's two forms in the modules that hold it.

    Attributes:
        name: from the root module, for people and state dicts.
        places: where it is held.
        layout: how it is cut.
        rank: which piece is this rank's.
        shard: this rank's rows; the parameter that optimizers know.
        whole: what modules compute with while their unit is whole; ``None`` before memory was made.
        unit: whose parameter it is.
    """

    unit: weakref.ref[Unit]

    def __init__(self, name: str, parameter: nn.Parameter, places: list[Place], rank: int, world_size: int) -> None:
        self.name = name
        self.places = places
        self.rank = rank
        self.layout = ShardLayout(tuple(parameter.shape), world_size)
        self.dtype = parameter.dtype
        shape = self.layout.shard_shape(rank)
        self.shard = nn.Parameter(
            torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
        )
        self.whole: nn.Parameter | None = None
        self.rows: Tensor | None = None
        self.on_gradient: Callable[[Tensor], None] | None = None
        self._hooked = False
        ORIGINALS[parameter] = weakref.ref(self)
        SHARDS[self.shard] = weakref.ref(self)

    def attach(self, rows: Tensor, whole: Tensor) -> None:
        """Lie in this memory from now on; what ``rows`` contain is the value."""
        self.rows = rows
        self.whole = nn.Parameter(whole, requires_grad=self.shard.requires_grad)
        WHOLES[self.whole] = weakref.ref(self)
        self._hooked = False
        if self.shard.is_meta:  # a meta parameter cannot be given memory: another object takes its place
            self.replace(nn.Parameter(rows, requires_grad=self.shard.requires_grad))
        else:
            self.shard.data = rows

    def cut_anew(self, rank: int, world_size: int) -> None:
        """Be another rank's piece, of another cut; rows and gradient are no longer valid."""
        self.rank, self.layout = rank, ShardLayout(self.layout.shape, world_size)
        self.shard.grad = None
        self.rows = None

    def show_whole(self) -> None:
        """Modules see the whole."""
        assert self.whole is not None
        if self.whole.requires_grad != self.shard.requires_grad:
            self.whole.requires_grad_(self.shard.requires_grad)
        if self.whole.requires_grad and not self._hooked and self.on_gradient is not None:
            self.whole.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]
            self._hooked = True
        for place in self.places:
            place.module._parameters[place.name] = self.whole

    def show_shard(self) -> None:
        """Modules hold the rows, as everything but their forward and backward expects."""
        for place in self.places:
            place.module._parameters[place.name] = self.shard

    def follow(self, unit: str) -> None:
        """See what the user did to the shard: another object, or other data, is taken over.

        Raises:
            RuntimeError: its shape is no longer that of this rank's rows.
        """
        held = self.places[0].module._parameters[self.places[0].name]
        if held is not self.shard:
            self._check(held, unit)
            assert held is not None
            self.replace(held)
        if self.rows is None or self.shard.data_ptr() != self.rows.data_ptr() or self.shard.shape != self.rows.shape:
            self._check(self.shard, unit)
            if self.rows is not None:
                self.rows.copy_(self.shard.detach())
                self.shard.data = self.rows

    def replace(self, parameter: nn.Parameter) -> None:
        """Another object is the shard from now on."""
        SHARDS.pop(self.shard, None)  # type: ignore[no-untyped-call]
        self.shard = parameter
        SHARDS[parameter] = weakref.ref(self)
        self.show_shard()

    def _check(self, held: Tensor | None, unit: str) -> None:
        expected = self.layout.shard_shape(self.rank)
        if held is None or tuple(held.shape) != expected:
            found = "gone" if held is None else f"of shape {tuple(held.shape)}"
            raise RuntimeError(
                f"The shard of {self.name} in unit {unit} is {found}; rank {self.rank} of {self.layout.world_size} "
                f"holds rows of shape {expected} of {self.layout.shape}. A parameter cannot be changed in shape after "
                "fully_shard: change the model first, or load values with load_state_dict."
            )


# Values are weak references: a sharded parameter holds the key, and nothing would ever be collected.
SHARDS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the parameter that optimizers know
WHOLES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the parameter that modules compute with
ORIGINALS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the whole parameter before sharding


def shard_of(parameter: Tensor) -> ShardedParameter | None:
    """What a parameter is a shard of, if it is one."""
    return _alive(SHARDS, parameter)


def sharded_before(parameter: Tensor) -> ShardedParameter | None:
    """What was made of a whole parameter, if it has been sharded."""
    return _alive(ORIGINALS, parameter)


def whole_of_sharded(parameter: Tensor) -> ShardedParameter | None:
    """What a parameter is the whole of, if it is one that exists only while its unit runs."""
    return _alive(WHOLES, parameter)


def all_shards() -> list[ShardedParameter]:
    """Every sharded parameter of this process."""
    return [found for key in SHARDS if (found := _alive(SHARDS, key)) is not None]


def _alive(table: WeakIdKeyDictionary, parameter: Tensor) -> ShardedParameter | None:
    reference: weakref.ref[ShardedParameter] | None = table.get(parameter)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def places_of(root: nn.Module, leave_out: Iterable[nn.Module]) -> dict[nn.Parameter, list[Place]]:
    """Each parameter below ``root`` with all its places, in order; modules in ``leave_out`` are not entered."""
    blocked = {id(module) for module in leave_out}
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}

    def visit(module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen or id(module) in blocked:
            return
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, []))[1].append(Place(module, name))
        for child in module.children():
            visit(child, seen)

    visit(root, set())
    return dict(found.values())
