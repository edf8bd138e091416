"""A unit: the parameters that are gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collective_error import told
from .exchange import Reduction
from .policies import MixedPrecisionPolicy
from .shard_layout import ShardLayout
from .sharded_parameter import ShardedParameter
from .state_settings import StateSettings
from .transports import AloneTransport, Transport
from .unit_memory import ParameterSpec, UnitMemory

if TYPE_CHECKING:
    from .run import Run


class State(Enum):
    """Of a unit's whole parameters."""

    SHARDED = "sharded"  # freed; modules hold rows
    GATHERING = "gathering"  # on their way; modules hold rows
    WHOLE = "whole"  # there; modules hold wholes


class Unit:
    """Gathers, frees and reduces the parameters of one module that no inner unit has.

    Attributes:
        name: of the module, from the root.
        module: whose forward needs the parameters.
        parameters: those of the unit.
        replicas: over which gradients are averaged besides (hybrid sharding), or ``None``.
        reshard_after_forward: whether parameters are freed between forward and backward; ``None``: unless it is the
            root.
        wish: which transport the user asked for.
        group: the ranks over which parameters are cut, or ``None``.
        mesh: of that group; made when it is first needed.
        near: how many ranks keep the whole among them between forward and backward, or ``None``.
        settings: how the wrapper around a root makes state dicts.
        run: the tree of units that it is part of.
        number: its place there.
    """

    run: Run
    number: int

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: list[ShardedParameter],
        transport: Transport,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload: bool,
        reshard_after_forward: bool | None,
        wish: str | None = None,
        group: dist.ProcessGroup | None = None,
        mesh: Any = None,
        near: int | None = None,
    ) -> None:
        self.name, self.module, self.parameters = name, module, parameters
        self.transport, self.replicas, self.device = transport, replicas, device
        self.policy, self.offload = policy, offload
        self.reshard_after_forward = reshard_after_forward
        self.wish = wish
        self.group, self.mesh, self.near = group, mesh, near
        self.settings = StateSettings()
        self.memory: UnitMemory | None = None
        self.state = State.SHARDED
        self.entered = 0  # forwards under way
        self.leaving = 0  # inputs whose gradients are not all there yet
        self.missing = 0  # gradients that the present backward has not brought
        self.divisor = _ranks(transport, replicas)

    # Memory

    def make_memory(self) -> None:
        """Allocate rows and a place for wholes; values are not set. All ranks of the unit call this together."""
        specs = [
            ParameterSpec(parameter.layout, parameter.dtype, self.policy.compute_dtype(parameter.dtype))
            for parameter in self.parameters
        ]
        with torch.inference_mode(False), torch.no_grad():
            transport = self.transport if specs else AloneTransport()
            self.memory = transport.memory(specs, self.device, self.offload, self.near)
            for parameter, rows, whole in zip(self.parameters, self.memory.rows, self.memory.wholes, strict=True):
                parameter.attach(rows, whole)
                parameter.show_shard()

    def ensure_memory(self) -> UnitMemory:
        """Take over what became of shards that were made on the meta device, and of those that users exchanged.

        Raises:
            RuntimeError: a parameter is still on the meta device, or its shape has changed.
        """
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.follow(self.name)
            if self.memory is None:
                values = [parameter.shard for parameter in self.parameters]
                for parameter, value in zip(self.parameters, values, strict=True):
                    if value.is_meta:
                        raise RuntimeError(
                            f"{parameter.name} in unit {self.name} is on the meta device. Give it values first: "
                            "dlaunch.parallel.fsdp.materialize(model), or model.to_empty(device=...) and a state dict."
                        )
                contents = [value.detach() for value in values]
                self.make_memory()
                assert self.memory is not None
                for rows, content in zip(self.memory.rows, contents, strict=True):
                    rows.copy_(content)
        assert self.memory is not None
        return self.memory

    def follow(self) -> None:
        """Take over what users exchanged, unless it has no values yet."""
        held = [parameter.places[0] for parameter in self.parameters]
        values = [place.module._parameters[place.name] for place in held]
        if self.state is State.SHARDED and not any(value is None or value.is_meta for value in values):
            self.ensure_memory()

    def give_up(self, parameter: ShardedParameter) -> None:
        """Leave a parameter to an outer unit; the memory of the others is made anew with their values."""
        contents = {other: other.shard.detach().clone() for other in self.parameters if other is not parameter}
        self.parameters = list(contents)
        if self.memory is not None:
            self.memory = None
            self.make_memory()
            with torch.no_grad():
                for other, content in contents.items():
                    assert other.rows is not None
                    other.rows.copy_(content)

    def use_transport(
        self, transport: Transport, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None
    ) -> None:
        """Lie in new memory, cut for another group; values are not set and gradients are dropped."""
        self.transport, self.group, self.replicas, self.mesh = transport, group, replicas, None
        self.divisor = _ranks(transport, replicas)
        for parameter in self.parameters:
            parameter.cut_anew(transport.rank, transport.world_size)
        self.memory = None
        self.make_memory()

    def abandon(self) -> None:
        """Modules hold rows, whatever was under way; what was being gathered is not waited for."""
        for parameter in self.parameters:
            parameter.show_shard()
        self.state, self.entered, self.leaving = State.SHARDED, 0, 0

    # Whole and sharded

    def begin_unshard(self) -> None:
        """Start the gather, if the parameters are neither whole nor coming; among near ranks after a forward."""
        if self.state is State.SHARDED:
            with torch.no_grad():
                memory = self.memory or self.ensure_memory()
                memory.begin_gather()
            self.state = State.GATHERING

    def unshard(self) -> None:
        """Return when modules see whole parameters."""
        if self.state is State.WHOLE:
            return
        self.begin_unshard()
        assert self.memory is not None
        with torch.no_grad(), told(f"the gather of unit {self.name}", self.transport.group):
            self.memory.finish_gather()
        for parameter in self.parameters:
            parameter.show_whole()
        self.state = State.WHOLE

    def reshard(self, *, but_near: bool = False) -> None:
        """Free the whole parameters; modules hold rows again.

        Args:
            but_near: near ranks keep the whole among them for the backward.
        """
        if self.state is State.SHARDED or self.memory is None:
            return
        if self.state is State.WHOLE:
            for parameter in self.parameters:
                parameter.show_shard()
        if but_near:
            self.memory.free_but_near()
        else:
            self.memory.free()
        self.state = State.SHARDED

    def forget_near(self) -> None:
        """What near ranks keep is of the last forward, and no longer wanted."""
        if self.near is not None and self.state is State.SHARDED and self.memory is not None:
            self.memory.forget_near()

    # Gradients

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share the parameters, and of those that hold copies."""
        return self.transport.rank == 0 and (self.replicas is None or dist.get_rank(self.replicas) == 0)

    @property
    def trainable(self) -> list[ShardedParameter]:
        """Those that need a gradient."""
        return [parameter for parameter in self.parameters if parameter.shard.requires_grad]

    @property
    def has_frozen(self) -> bool:
        """Whether its backward may go on after the last gradient is there."""
        return any(not parameter.shard.requires_grad for parameter in self.parameters)

    def begin_reduce(self) -> UnitReduction:
        """Take the gradients of the wholes and start to sum them; a missing one counts as zeros."""
        trainable = self.trainable
        gradients, layouts = [], []
        used = []
        for parameter in trainable:
            assert parameter.whole is not None
            gradient, parameter.whole.grad = parameter.whole.grad, None
            used.append(gradient is not None)
            gradients.append(self._ready_to_sum(gradient, parameter.whole))
            layouts.append(parameter.layout)
        # One row of flags for each rank: their sum tells how many ranks used each parameter.
        flags = torch.tensor(used, dtype=torch.float32, device=gradients[0].device)
        gradients.append(flags.expand(self.transport.world_size, -1).contiguous())
        layouts.append(ShardLayout((self.transport.world_size, len(used)), self.transport.world_size))
        return UnitReduction(self, trainable, self.transport.reduce(gradients, layouts))

    def _ready_to_sum(self, gradient: Tensor | None, whole: Tensor) -> Tensor:
        dtype = self.policy.sum_dtype(whole.dtype)
        if gradient is None:
            return torch.zeros(whole.shape, dtype=dtype, device=whole.device)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        gradient = gradient.detach().to(dtype).contiguous()
        return gradient / self.divisor if dtype is torch.float16 else gradient


def _ranks(transport: Transport, replicas: dist.ProcessGroup | None) -> float:
    return float(transport.world_size * (dist.get_world_size(replicas) if replicas is not None else 1))


class UnitReduction:
    """Gradients of one unit on their way to the shards."""

    def __init__(self, unit: Unit, parameters: Sequence[ShardedParameter], reduction: Reduction) -> None:
        self._unit, self._parameters, self._reduction = unit, parameters, reduction
        self._sums: list[Tensor] | None = None

    def wait(self) -> None:
        """Return when this rank's sums are there; wholes' gradients are freed by then."""
        if self._sums is None:
            with told(f"the reduction of unit {self._unit.name}", self._unit.transport.group):
                self._sums = self._over_replicas(self._reduction.wait())
            del self._reduction

    def hand_over(self) -> None:
        """Add the averages to the gradients of the shards; a parameter that no rank used gets none."""
        self.wait()
        assert self._sums is not None
        *sums, flags = self._sums
        for parameter, total, users in zip(self._parameters, sums, flags.view(-1).tolist(), strict=True):
            if users > 0:
                self._give(parameter, total)
        self._sums = []

    def _give(self, parameter: ShardedParameter, total: Tensor) -> None:
        if total.dtype is not torch.float16 and self._unit.divisor != 1:
            total.div_(self._unit.divisor)
        shard = parameter.shard
        gradient = total.to(dtype=shard.dtype, device=shard.device)
        if shard.grad is None:
            shard.grad = gradient
        else:
            shard.grad += gradient

    def _over_replicas(self, sums: list[Tensor]) -> list[Tensor]:
        if self._unit.replicas is None:
            return sums
        flats: dict[torch.dtype, list[int]] = {}
        for index, total in enumerate(sums):
            flats.setdefault(total.dtype, []).append(index)
        result = list(sums)
        for indices in flats.values():
            flat = torch.cat([sums[index].reshape(-1) for index in indices])
            dist.all_reduce(flat, group=self._unit.replicas)
            pieces = torch.split(flat, [sums[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                result[index] = piece.view(sums[index].shape)
        return result
