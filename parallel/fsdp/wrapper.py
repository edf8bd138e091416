"""``FullyShardedDataParallel``: for scripts that wrap a model rather than shard it in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlaunch.errors import UsageError

from ..agreement import largest
from .clip import clip_grad_norm_
from .fully_shard import FSDPModule, fully_shard, run_of, unit_of
from .materialize import materialize
from .optimizer_state import dtensor_optimizer_state_dict, full_optimizer_state_dict, optimizer_state_to_load
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, offloads
from .refusals import OF_THE_WRAPPER, refuse, refused
from .state import dtensor_state_dict, full_state_dict
from .state_settings import StateSettings, as_torchs, settings_of
from .summon import summoned
from .wrap_policies import WrapPolicy, by_class, modules_to_shard

_Wrapper = TypeVar("_Wrapper", bound="FullyShardedDataParallel")


class ShardingStrategy(Enum):
    """What is cut over the ranks. torch's enum of this name works too."""

    FULL_SHARD = "parameters, gradients and optimizer state"
    SHARD_GRAD_OP = "gradients and optimizer state; parameters stay whole from forward to backward"
    NO_SHARD = "nothing: gradients are averaged"
    HYBRID_SHARD = "everything within a group, with copies across groups"


class FullyShardedDataParallel(nn.Module):
    """Shard a module and those of its modules that a policy chooses; see `fully_shard`, which does the work.

    Names in ``state_dict`` and ``named_parameters`` are those of the plain module. Build the optimizer after wrapping.
    Arguments are torch's, in torch's order (torch 2.13, distributed/fsdp/fully_sharded_data_parallel.py).

    Args:
        module: the model.
        process_group: the ranks, or the pair ``(shard, replicate)`` for ``HYBRID_SHARD``.
        sharding_strategy: ours or torch's; full if ``None``.
        cpu_offload: anything with ``offload_params`` true, or a `CPUOffloadPolicy`.
        auto_wrap_policy: a set of classes, a policy of ``wrap_policies`` or one of torch's; only the root if ``None``.
        backward_prefetch: not used: the unit before is always gathered ahead.
        mixed_precision: a `MixedPrecisionPolicy`, or torch's.
        ignored_modules: their parameters stay whole, and their gradients are not averaged.
        param_init_fn: gives a module on the meta device its values; ``reset_parameters`` of the module if ``None``.
        device_id: where the model computes; where it is if ``None``.
        sync_module_states: take the first rank's values.
        forward_prefetch: not used: the next unit is always gathered ahead.
        limit_all_gathers: not used: two units at most are gathered or whole beside those that are kept.
        use_orig_params: not used: parameters always keep their names.
        ignored_states: parameters, or modules, as ``ignored_modules``.
        device_mesh: in the place of ``process_group``.
        transport: as in `fully_shard`.

    Raises:
        ValueError: ``HYBRID_SHARD`` with one group.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: WrapPolicy | Collection[type[nn.Module]] | None = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        transport: str | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device_id) if device_id is not None else None
        if device is not None and not any(parameter.is_meta for parameter in module.parameters()):
            module.to(device)
        group, reshard = _resolve(getattr(sharding_strategy, "name", "FULL_SHARD"), process_group, device_mesh)
        arguments: dict[str, Any] = {
            "process_group": group,
            "mesh": device_mesh if group is None else None,
            "reshard_after_forward": reshard,
            "mp_policy": mixed_precision,
            "offload_policy": CPUOffloadPolicy() if offloads(cpu_offload) else OffloadPolicy(),
            "ignored_params": _ignored(ignored_modules, ignored_states),
            "sync_module_states": sync_module_states,
            "device": device,
            "transport": transport,
        }
        for inner in _chosen(module, auto_wrap_policy):
            fully_shard(inner, **arguments)
        root_policy = MixedPrecisionPolicy.of(mixed_precision)
        if getattr(mixed_precision, "cast_root_forward_inputs", False):
            root_policy = replace(root_policy, cast_forward_inputs=True)
        self.module = fully_shard(module, **{**arguments, "mp_policy": root_policy})
        if any(parameter.is_meta for parameter in module.parameters()):
            materialize(module, param_init_fn)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have itself is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: int) -> Any:
        """An item of a wrapped ``Sequential``."""
        return self.module[key]  # type: ignore[index]

    def apply(self: _Wrapper, fn: Callable[[nn.Module], None]) -> _Wrapper:
        """``fn`` on every module, with whole parameters; all ranks call it together."""
        with FullyShardedDataParallel.summon_full_params(self):
            return super().apply(fn)

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return run_of(self.module).units[-1] is unit_of(self.module)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank, whole, and send nothing; the first backward outside sums them."""
        run = run_of(self.module)
        before, run.reduces = run.reduces, False
        try:
            yield
        finally:
            run.reduces = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm over all ranks of at most ``max_norm``; returns the norm before."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    # Names: those of the plain module, also where a wrapper is within another

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, and the modules below it under the plain module's names."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Under the plain module's names; all ranks call this together.

        Whole tensors on every rank, on the first only with ``rank0_only``, or what ``state_dict_type`` says.
        """
        if not self.check_is_root():  # an outer one puts the state dict together
            arguments = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            return self.module.state_dict(**arguments)
        settings = self._settings
        if settings.sharded:
            state = dtensor_state_dict(self.module)
        else:
            state = full_state_dict(self.module, rank0_only=rank0_only or settings.rank0_only)
            if not settings.to_host:
                device = unit_of(self.module).device
                state = {name: value.to(device) for name, value in state.items()}
        if destination is None:
            return {prefix + name: value for name, value in state.items()} if prefix else state
        shown: dict[str, Any] = destination
        shown.update({prefix + name: value for name, value in state.items()})
        return shown

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over whole tensors, DTensors, or this rank's rows."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Within another module that is loaded: give the names the level that they lack."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _settings(self) -> StateSettings:
        return unit_of(self.module).settings

    # torch's static methods

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The modules that are units; with ``root_only`` those that no other unit contains."""
        units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        return [inner for inner in units if not root_only or run_of(inner).units[-1].module is inner]

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Modules hold whole parameters for a while; all ranks enter and leave together.

        Args:
            module: with sharded modules in it, or one.
            recurse: those of all units within; else of the module itself.
            writeback: keep what is changed.
            rank0_only: whole on the first rank only; with ``writeback=False``.
            offload_to_cpu: in host memory.
            with_grads: gradients too.
        """
        inner = module.module if isinstance(module, FullyShardedDataParallel) else module
        units = FullyShardedDataParallel.fsdp_modules(inner)
        chosen = [unit_of(unit) for unit in units if recurse or unit is inner]
        with summoned(chosen, writeback=writeback, rank0_only=rank0_only, offload=offload_to_cpu, grads=with_grads):
            yield

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Any:
        """Set the form of the state dicts of a wrapper, or of those within a module; returns torch's old settings."""
        before = FullyShardedDataParallel.get_state_dict_type(module)
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        for root in FullyShardedDataParallel.fsdp_modules(module, root_only=True):
            unit_of(root).settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """torch's ``StateDictSettings`` of a wrapper, or of the first within a module."""
        return as_torchs(_settings_of(module))

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Iterator[None]:
        """Set the form of state dicts for a while; takes torch's types and configs."""
        roots = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
        before = [unit_of(root).settings for root in roots]
        FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for root, settings in zip(roots, before, strict=True):
                unit_of(root).settings = settings

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """The optimizer's state under the parameters' names, in the form that was set; all ranks call it together.

        What ``optim_state_dict`` gives, the optimizer itself has, so it is not looked at.
        """
        settings = _settings_of(model)
        if settings.sharded:
            return dtensor_optimizer_state_dict(model, optim)
        return full_optimizer_state_dict(model, optim, rank0_only=settings.optimizer_rank0_only)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """The optimizer's whole state under the parameters' names; all ranks call it together."""
        return full_optimizer_state_dict(model, optim, rank0_only=rank0_only)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, from what `optim_state_dict` gave; each rank has all of it.

        Raises:
            UsageError: this rank was given nothing and another was (``rank0_only``), or a named optimizer.
        """
        if is_named_optimizer:
            raise refused("optim_state_dict_to_load(is_named_optimizer=True)")
        if _settings_of(model).optimizer_rank0_only:
            given = bool(optim_state_dict.get("state"))
            if largest([int(given)], run_of(model).units[-1].group) != [int(given)]:
                raise UsageError(
                    "this rank was given no optimizer state.", "Load the file on every rank: each keeps only its rows."
                )
        state = optimizer_state_to_load(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state


for _name in OF_THE_WRAPPER:
    refuse(FullyShardedDataParallel, _name)


def _settings_of(module: nn.Module) -> StateSettings:
    roots = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
    return unit_of(roots[0]).settings if roots else StateSettings()


def _resolve(strategy: str, process_group: Any, mesh: Any) -> tuple[Any, bool | None]:
    match strategy:
        case "NO_SHARD":
            group = process_group or (mesh.get_group() if mesh is not None else dist.group.WORLD)
            return (None, group), None
        case "SHARD_GRAD_OP":
            return process_group, False
        case "HYBRID_SHARD" | "_HYBRID_SHARD_ZERO2":
            reshard = None if strategy == "HYBRID_SHARD" else False
            if process_group is None and mesh is None:
                return _within_and_across_hosts(), reshard
            if not isinstance(process_group, tuple) and mesh is None:
                raise ValueError(
                    "HYBRID_SHARD needs process_group=(shard group, replicate group), or a mesh of two dimensions"
                )
            return process_group, reshard
        case _:
            return process_group, None


def _within_and_across_hosts() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's host, and the ranks with its place on all hosts; as many ranks on each as LOCAL_WORLD_SIZE says."""
    size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count() or size
    if local >= size or size % local:
        return dist.group.WORLD, None
    place = dist.get_rank()
    within = [dist.new_group(list(range(begin, begin + local))) for begin in range(0, size, local)]
    across = [dist.new_group(list(range(begin, size, local))) for begin in range(local)]
    return within[place // local], across[place % local]


def _chosen(module: nn.Module, policy: Any) -> list[nn.Module]:
    if policy is None:
        return []
    rule = policy if callable(policy) else by_class(policy)
    done = (FSDPModule, FullyShardedDataParallel)
    return [inner for inner in modules_to_shard(module, rule) if not isinstance(inner, done)]


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Parameter | nn.Module] | None
) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for item in (*(modules or ()), *(states or ())):
        found += [item] if isinstance(item, nn.Parameter) else list(item.parameters())
    return found
