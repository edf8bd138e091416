"""``fully_shard``: a module's parameters cut into rows, one piece for each rank, in place.

The public face, in the style of torch's FSDP2: apply it to inner modules first and to the root last. What happens when
is in ``run.py``, one unit's work in ``unit.py``, one parameter's two forms in ``sharded_parameter.py``, how pieces
travel in ``exchange.py`` and ``transports.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ddp.broadcast import broadcast_coalesced
from .before_step import install
from .near_ranks import resharding_of
from .policies import MixedPrecisionPolicy, offloads
from .refusals import OF_MODULES, refuse, refused
from .run import PostForward, PreForward, Run
from .shard_guard import guard_inner_modules
from .sharded_parameter import Place, ShardedParameter, places_of, shard_of, sharded_before
from .transports import transport_for
from .unit import Unit

Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
_Module = TypeVar("_Module", bound=nn.Module)


class FSDPModule:
    """What a sharded module can do besides: it is an instance of its own class and of this one."""

    _dlaunch_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class that it was: a slice of a sharded ``Sequential`` is a plain one."""
        return cls.__bases__[1](*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would share this rank's rows."""
        raise TypeError(
            f"a sharded {type(self).__bases__[1].__name__} can be neither copied nor pickled. "
            "Load its full_state_dict into another module instead."
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast rows, not wholes (``to``, ``to_empty`` and the like come here)."""
        unit = unit_of(self)
        unit.reshard()
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        unit.follow()
        return self

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make this module's own parameters whole until `reshard`, to look at them or to run parts of it.

        With ``async_op`` the gather has only begun, and the handle waits for it; so does the module's forward.
        """
        unit = unit_of(self)
        unit.run.prepare()
        if async_op:
            unit.begin_unshard()
            return UnshardHandle(unit)
        unit.unshard()
        return None

    def reshard(self) -> None:
        """Free this module's whole parameters."""
        unit_of(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False``: backwards add gradients up on each rank, whole, and nothing is sent; for the whole model."""
        unit_of(self).run.reduces = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Change what `fully_shard` was told, for this module and, with ``recurse``, the units within."""
        for unit in _units_below(self) if recurse else [unit_of(self)]:
            frees, near = resharding_of(reshard_after_forward, unit.transport.world_size)
            if near != unit.near:
                raise ValueError("the number of ranks that keep parameters after forward is set by fully_shard, once")
            unit.reshard_after_forward = frees

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by this number, not by that of the ranks; for this module's own parameters."""
        unit_of(self).divisor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Hybrid sharding always averages over both groups: raises UsageError for ``False``."""
        if not requires_all_reduce:
            raise refused("set_requires_all_reduce(False)")

    def reset_iter_state(self) -> None:
        """Nothing: the next forward begins anew after one, or a backward, that raised."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: a backward is complete when it returns."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing: no parameters are whole after a backward."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Nothing: the next unit of the last forward is gathered ahead."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Nothing: the unit before is gathered ahead."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Without communication for a while. The first backward outside sums what has come together."""
        run = unit_of(self).run
        before, run.reduces = run.reduces, False
        try:
            yield
        finally:
            run.reduces = before


for _name in OF_MODULES:
    refuse(FSDPModule, _name)


class UnshardHandle:
    """Parameters on their way to be whole."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when they are."""
        self._unit.unshard()


def fully_shard(
    module: _Module,
    *,
    process_group: dist.ProcessGroup | Groups | None = None,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    sync_module_states: bool = False,
    device: torch.device | None = None,
    transport: str | None = None,
) -> _Module:
    """Shard the parameters of a module that no inner unit has, on dimension 0, and make it a unit.

    The module's parameters are then this rank's rows, under their names; build the optimizer of them. Forward and
    backward gather them, and gradients arrive averaged over the ranks, as rows too. All ranks call this together.

    Args:
        module: gets ``FSDPModule``'s methods; its class becomes a subclass of its own.
        process_group: the ranks that share the parameters (the default group if ``None``), or a pair: those that
            share, and those that hold the same rows and average gradients (hybrid sharding). ``None`` as the first of
            the pair means no sharding.
        mesh: a device mesh of one dimension, or of two (replicate, shard), in the place of ``process_group``.
        reshard_after_forward: free whole parameters between forward and backward; ``None``: unless this is the root. A
            number that divides the world: so many neighbours keep them among them, and gather from one another.
        mp_policy: a `MixedPrecisionPolicy`, or torch's.
        offload_policy: a `CPUOffloadPolicy` (or torch's): rows, gradients and the optimizer's step in host memory.
        ignored_params: stay as they are; their gradients are not averaged.
        sync_module_states: take the first rank's parameters and buffers, rather than trust that all have the same.
        device: where the module computes; where its parameters are if ``None`` (CPU for meta parameters).
        transport: ``auto``, ``torch``, ``flat`` or ``shared_memory``; see ``transport_for``.

    Returns:
        ``module``.

    Raises:
        ValueError: the module is sharded already, or shares a parameter with a unit outside of it, or the ranks cannot
            be divided as ``reshard_after_forward`` says.
    """
    if isinstance(module, FSDPModule):
        raise ValueError(f"this {type(module).__name__} is sharded already: call fully_shard once, inner modules first")
    install()
    shared, replicas = _groups(process_group, mesh)
    inner = _units_below(module)
    names = _names(module)
    found = _own_parameters(module, {id(parameter) for parameter in ignored_params or ()}, names)
    where = device or _device_of(list(found))
    if sync_module_states:
        _take_first_ranks([*found, *module.buffers()], shared, replicas)
    chosen = transport_for(shared, where, transport)
    parameters = [
        ShardedParameter(names[id(places[0].module), places[0].name], parameter, places, chosen.rank, chosen.world_size)
        for parameter, places in found.items()
    ]
    policy = MixedPrecisionPolicy.of(mp_policy)
    frees, near = resharding_of(reshard_after_forward, chosen.world_size)
    unit = Unit(
        "(root)",
        module,
        parameters,
        chosen,
        replicas,
        where,
        policy,
        offloads(offload_policy),
        frees,
        transport,
        shared,
        mesh if mesh is not None and mesh.ndim == 1 else None,
        near,
    )
    _join(unit, inner, names)
    _fill(unit, list(found))
    _cast_buffers(module, policy.buffer_dtype)
    guard_inner_modules(unit)
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    module._dlaunch_unit = unit  # type: ignore[assignment]
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module be a forward of it; nothing if it is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"this {type(module).__name__} has no method {method_name}")
    method = getattr(module, method_name)
    before, after = PreForward(unit_of(module)), PostForward(unit_of(module))

    @wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(module, args, kwargs)
        output: Any = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = after(module, args, output)
        return output

    setattr(module, method_name, forward)


def unit_of(module: Any) -> Unit:
    """The unit that a sharded module is."""
    unit: Unit = module._dlaunch_unit
    return unit


def run_of(module: nn.Module) -> Run:
    """The run of a sharded module, or of a module with sharded ones in it.

    Raises:
        ValueError: nothing in it is sharded, or its parts belong to no common root.
    """
    runs = {id(unit.run): unit.run for unit in _units_below(module)}
    if len(runs) != 1:
        found = "nothing" if not runs else "several roots"
        raise ValueError(f"{found} in this {type(module).__name__} is sharded: call fully_shard on the root, last")
    return next(iter(runs.values()))


def _units_below(module: Any) -> list[Unit]:
    return [unit_of(inner) for inner in module.modules() if isinstance(inner, FSDPModule)]


def _groups(process_group: Any, mesh: Any) -> Groups:
    if mesh is not None:
        return (mesh.get_group(1), mesh.get_group(0)) if mesh.ndim == 2 else (mesh.get_group(), None)
    if isinstance(process_group, tuple):
        shared, replicas = process_group
        return shared, replicas
    return process_group or dist.group.WORLD, None


def _device_of(parameters: list[nn.Parameter]) -> torch.device:
    kinds = {parameter.device for parameter in parameters if not parameter.is_meta}
    return next(iter(kinds)) if kinds else torch.device("cpu")


def _names(root: nn.Module) -> dict[tuple[int, str], str]:
    """``(id(module), name)`` of every parameter, and ``(id(module), "")`` of every module: its name from the root."""
    names: dict[tuple[int, str], str] = {}
    for prefix, module in root.named_modules():
        names.setdefault((id(module), ""), prefix)
        for name in module._parameters:
            names.setdefault((id(module), name), f"{prefix}.{name}" if prefix else name)
    return names


def _own_parameters(
    module: nn.Module, ignored: set[int], names: dict[tuple[int, str], str]
) -> dict[nn.Parameter, list[Place]]:
    found = places_of(module, ())
    own: dict[nn.Parameter, list[Place]] = {}
    for parameter, places in found.items():
        if id(parameter) in ignored or shard_of(parameter) is not None:
            continue
        before = sharded_before(parameter)
        own[parameter] = places if before is None else [*_release(module, before, names), *places]
    return own


def _release(module: nn.Module, tied: ShardedParameter, names: dict[tuple[int, str], str]) -> list[Place]:
    """A parameter is used in an inner unit and outside of it: it moves to the unit that has both."""
    for unit in _units_below(module):
        if tied in unit.parameters:
            unit.give_up(tied)
            return tied.places
    name = names.get((id(tied.places[0].module), tied.places[0].name), tied.name)
    raise ValueError(
        f"parameter {name} is shared with a unit outside of this {type(module).__name__}: "
        "call fully_shard on a module that contains both, and not on both"
    )


def _join(unit: Unit, inner: list[Unit], names: dict[tuple[int, str], str]) -> None:
    run = Run()
    for other in inner:
        other.name = names[id(other.module), ""]
        for parameter in other.parameters:
            place = parameter.places[0]
            parameter.name = names[id(place.module), place.name]
        run.absorb(other.run)
    run.add(unit)


def _fill(unit: Unit, originals: list[nn.Parameter]) -> None:
    """Cut the values; from here on the whole is only gathered."""
    for parameter in unit.parameters:
        parameter.show_shard()
    if any(original.is_meta for original in originals):
        return
    unit.make_memory()
    with torch.no_grad():
        for parameter, original in zip(unit.parameters, originals, strict=True):
            assert parameter.rows is not None
            begin, end = parameter.layout.rows(parameter.rank)
            parameter.rows.copy_((original if original.dim() else original.view(1))[begin:end])


def _take_first_ranks(tensors: list[Tensor], *groups: dist.ProcessGroup | None) -> None:
    present = [tensor for tensor in tensors if not tensor.is_meta]
    for group in groups:
        if group is not None and present:
            broadcast_coalesced(present, 0, group)


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
