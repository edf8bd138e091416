"""A tree of units at work: who is gathered, freed and reduced when. Driven by the hooks of the units' modules.

[Note: the order of reductions]
All ranks must start reductions in the same order. It is the reverse of the order in which units were first used: a unit
whose gradients are complete waits for those before it. What is incomplete when the backward ends (parameters that this
rank did not use) is reduced then, in the same order.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from ..ddp.graph import find_tensors
from .same_order import CommonPath
from .schedule import is_last, next_in_backward, next_in_forward
from .shard_guard import RowsInUse, is_compiled
from .state_forms import StateForm, watch_state_dict
from .unit import State, Unit, UnitReduction

_IN_FLIGHT = 2  # reductions that hold memory at the same time


class Run:
    """One root module and its units.

    Attributes:
        units: in the order in which they were made; inner ones first.
        reduces: whether a backward is followed by reductions (``no_sync`` clears it).
        form: what state dicts show.
        steps: that optimizers of torch have made on its rows.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.reduces = True
        self.form = StateForm.ROWS
        self.steps = 0
        self._depth = 0
        self._seen: list[int] = []  # the last whole forward
        self._done: list[int] = []  # the present one
        self._path = CommonPath()
        self._first_uses: list[int] = []  # by forwards with gradients since the last backward
        self._stale = False  # whether those belong to a backward that is over
        self._finished: set[int] = set()
        self._in_flight: list[UnitReduction] = []
        self._queued = False
        self._any_gradient = False
        self._reading = False
        self._with_gradients = True
        self._looked = False  # whether a whole forward with gradients used no rows
        self._look: RowsInUse | None = None

    def add(self, unit: Unit) -> None:
        """Hook a unit's module and its parameters."""
        self.units.append(unit)
        self._number_units()
        for parameter in unit.parameters:
            parameter.on_gradient = unit_hook(unit)
            parameter.unit = weakref.ref(unit)
        unit.module.register_forward_pre_hook(PreForward(unit), prepend=True, with_kwargs=True)
        unit.module.register_forward_hook(PostForward(unit), always_call=True)
        watch_state_dict(unit)

    def absorb(self, other: Run) -> None:
        """Take over the units of an inner run."""
        if other is self:
            return
        self.units = [*other.units, *self.units]
        self._number_units()
        self._seen, self._looked = [], False

    def _number_units(self) -> None:
        for number, unit in enumerate(self.units):
            unit.run, unit.number = self, number

    # Forward

    def before_forward(self, unit: Unit) -> None:
        """The unit's module is about to run."""
        if _in_backward():  # activation checkpointing computes a forward again
            if unit.number not in self._first_uses:  # its forward ran without gradients, and comes after all others
                self._first_uses.insert(0, unit.number)
            unit.unshard()
            return
        number = unit.number
        if self._depth == 0:
            self._begin_forward()
        self._depth += 1
        unit.entered += 1
        self._done.append(number)
        if self._with_gradients and number not in self._first_uses:
            self._first_uses.append(number)
        self._path.come_to(unit)
        unit.forget_near()
        unit.unshard()
        ahead = next_in_forward(self._seen, self._done)
        if ahead is not None:
            self.units[ahead].forget_near()
            self.units[ahead].begin_unshard()

    def _begin_forward(self) -> None:
        if self._queued:
            self._abandon_backward()
        self._done = []
        self._with_gradients = torch.is_grad_enabled()
        if self._stale and self._with_gradients:
            self._first_uses, self._stale = [], False
        self.prepare()
        if self._with_gradients and not self._looked and not is_compiled(self.units[-1].module):
            self._look = RowsInUse()
            self._look.__enter__()  # type: ignore[no-untyped-call]

    def _abandon_backward(self) -> None:
        """The last backward raised: its gradients are incomplete, and are dropped."""
        for unit in self.units:
            for parameter in unit.parameters:
                if parameter.whole is not None:
                    parameter.whole.grad = None
        self._queued, self._any_gradient, self._stale = False, False, True
        self._finished, self._in_flight = set(), []
        self._path.abandon()

    def after_forward(self, unit: Unit, output: Any) -> None:
        """The unit's module has run, or failed."""
        if _in_backward() or unit.entered == 0:
            return
        unit.entered -= 1
        self._depth -= 1
        if self._depth == 0 and self._look is not None:
            self._look.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._look, self._looked = None, sys.exc_info()[0] is None
        backward_comes = torch.is_grad_enabled() and self._watch_backward(unit, output)
        if unit.entered == 0 and (not backward_comes or self._frees_after_forward(unit)):
            unit.reshard(but_near=backward_comes)
        if self._depth == 0:
            self._end_forward(backward_comes)

    def _frees_after_forward(self, unit: Unit) -> bool:
        number = unit.number
        wish = unit.reshard_after_forward
        if wish is None:
            wish = unit is not self.units[-1]  # the root's parameters would come back at once
        return wish and not (self._done[-1] == number and is_last(self._seen, self._done))

    def _end_forward(self, backward_comes: bool) -> None:
        self._seen = self._done
        if not backward_comes:
            self._path.end(self.units[-1])
            self.settle()

    def _watch_backward(self, unit: Unit, output: Any) -> bool:
        nodes = {tensor.grad_fn for tensor in _with_bases(find_tensors(output)) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(lambda *_: self.before_backward(unit))
        return bool(nodes)

    def watch_leaving(self, unit: Unit, inputs: Any) -> None:
        """Learn when the backward has left a unit with frozen parameters: its inputs' gradients are complete."""
        if _in_backward() or not torch.is_grad_enabled() or not unit.has_frozen:
            return
        nodes = {tensor.grad_fn for tensor in find_tensors(inputs) if tensor.grad_fn is not None}
        unit.leaving += len(nodes)
        for node in nodes:
            node.register_prehook(lambda *_: self._left_by_one(unit))

    def _left_by_one(self, unit: Unit) -> None:
        unit.leaving -= 1
        if unit.leaving == 0 and (unit.number in self._finished or not unit.trainable):
            unit.reshard()

    # Backward

    def before_backward(self, unit: Unit) -> None:
        """The backward is about to enter the unit."""
        self._queue_end()
        unit.unshard()
        ahead = next_in_backward(self._first_uses, unit.number, self._finished)
        if ahead is not None:
            self.units[ahead].begin_unshard()

    def _queue_end(self) -> None:
        if self._queued:
            return
        self._queued = True
        if not self._reading:
            self._begin_reading()
        for unit in self.units:
            unit.missing = len(unit.trainable)
        Variable._execution_engine.queue_callback(self._end_backward)

    def gradient_came(self, unit: Unit) -> None:
        """Autograd has the whole gradient of one of the unit's parameters."""
        self._queue_end()
        self._any_gradient = True
        unit.missing -= 1
        if unit.missing == 0 and self.reduces:
            self._launch_complete()

    def _launch_complete(self) -> None:
        for number in reversed(self._first_uses):
            if number in self._finished:
                continue
            if self.units[number].missing > 0:
                return
            self._launch(self.units[number])

    def _launch(self, unit: Unit) -> None:
        self._finished.add(unit.number)
        if not unit.trainable:
            return
        if unit.leaving == 0 or not unit.has_frozen:
            unit.reshard()
        if len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight[-_IN_FLIGHT].wait()
        self._in_flight.append(unit.begin_reduce())

    def _end_backward(self) -> None:
        self._queued = False
        try:
            if self.reduces and self._any_gradient:
                self._reduce_the_rest()
        finally:
            self._in_flight = []
            self._finished = set()
            self._any_gradient = False
            self._stale = True
            for unit in self.units:
                unit.leaving = 0
            self._path.end(self.units[-1])
            self.settle()

    def _reduce_the_rest(self) -> None:
        for number in reversed(self._first_uses):
            if number not in self._finished:
                self._launch(self.units[number])
        with torch.no_grad():
            for reduction in self._in_flight:
                reduction.hand_over()

    # Between iterations

    def prepare(self) -> None:
        """Take over what users did to shards, and tell the other ranks that this one's rows may be read."""
        for unit in self.units:
            if unit.state is State.SHARDED:
                unit.ensure_memory()
        self._begin_reading()

    def _begin_reading(self) -> None:
        self._reading = True
        for transport in self._transports():
            transport.begin_reading()

    def settle(self) -> None:
        """Free all wholes, and return when no rank reads this rank's rows: they may be changed."""
        for unit in self.units:
            unit.reshard()
            unit.forget_near()
        if self._reading:
            self._reading = False
            for transport in self._transports():
                transport.end_reading()

    def abandon(self) -> None:
        """Forget the iteration under way, without waiting for anyone: some rank may be gone."""
        self._abandon_backward()
        for unit in self.units:
            unit.abandon()
        self._depth, self._reading = 0, False
        self._seen, self._done = [], []
        self._path.forget()

    def _transports(self) -> Iterator[Any]:
        return iter({id(unit.transport): unit.transport for unit in self.units}.values())


def _with_bases(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, and of views the tensor that they show: a change in place goes round the view's own node."""
    for tensor in tensors:
        yield tensor
        if tensor._is_view() and tensor._base is not None:
            yield tensor._base


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class PreForward:
    """Hook: unshard, and cast inputs."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @_disable_dynamo
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a forward of the module."""
        run = self._unit.run
        with torch._C.DisableTorchFunction():  # what we do ourselves is not looked at
            run.before_forward(self._unit)
            run.watch_leaving(self._unit, (args, kwargs))
        policy = self._unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        return args, kwargs


class PostForward:
    """Hook: reshard, watch for the backward, and cast outputs."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After it; ``output`` is ``None`` if it raised."""
        with torch._C.DisableTorchFunction():
            self._unit.run.after_forward(self._unit, output)
        dtype = self._unit.policy.output_dtype
        return output if dtype is None else _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, tree)


def unit_hook(unit: Unit) -> Callable[[Tensor], None]:
    """Post-accumulate hook of a whole parameter."""

    def came(_: Tensor) -> None:
        unit.run.gradient_came(unit)

    return came
