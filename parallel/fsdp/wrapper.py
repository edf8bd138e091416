"""``FullyShardedDataParallel``: for scripts that wrap a model rather than shard it in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .clip import clip_grad_norm_
from .fully_shard import FSDPModule, fully_shard, run_of
from .materialize import materialize
from .policies import CPUOffloadPolicy, OffloadPolicy, offloads
from .state import full_state_dict
from .wrap_policies import WrapPolicy, by_class, modules_to_shard


class ShardingStrategy(Enum):
    """What is cut over the ranks. torch's enum of this name works too."""

    FULL_SHARD = "parameters, gradients and optimizer state"
    SHARD_GRAD_OP = "gradients and optimizer state; parameters stay whole from forward to backward"
    NO_SHARD = "nothing: gradients are averaged"
    HYBRID_SHARD = "everything within a group, with copies across groups"


class FullyShardedDataParallel(nn.Module):
    """Shard a module and those of its modules that a policy chooses; see `fully_shard`, which does the work.

    Names in ``state_dict`` and ``named_parameters`` are those of the plain module. Build the optimizer after wrapping.

    Args:
        module: the model.
        process_group: the ranks, or the pair ``(shard, replicate)`` for ``HYBRID_SHARD``.
        sharding_strategy: ours or torch's; full if ``None``.
        cpu_offload: anything with ``offload_params`` true, or a `CPUOffloadPolicy`.
        auto_wrap_policy: a set of classes, a policy of ``wrap_policies`` or one of torch's; only the root if ``None``.
        mixed_precision: a `MixedPrecisionPolicy`, or torch's.
        ignored_modules: their parameters stay whole, and their gradients are not averaged.
        ignored_states: the same for parameters, or modules.
        param_init_fn: gives a module on the meta device its values; ``reset_parameters`` of the module if ``None``.
        device_id: where the model computes; where it is if ``None``.
        sync_module_states: take the first rank's values.
        device_mesh: in the place of ``process_group``.
        transport: as in `fully_shard`.
        options: ``backward_prefetch``, ``forward_prefetch``, ``limit_all_gathers`` and ``use_orig_params`` of torch's
            signature: one unit is always gathered ahead, two at most, and parameters always keep their names.

    Raises:
        TypeError: an option that torch's class does not know either.
        ValueError: ``HYBRID_SHARD`` without a pair of groups.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: WrapPolicy | Collection[type[nn.Module]] | None = None,
        mixed_precision: Any = None,
        ignored_modules: Collection[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        ignored_states: Collection[nn.Parameter | nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        transport: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(options)
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
        self.module = fully_shard(module, **arguments)
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

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain module's names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *, rank0_only: bool = False, **_: Any) -> dict[str, Any]:  # type: ignore[override]
        """Whole tensors in host memory under the plain module's names; all ranks call this together."""
        return full_state_dict(self.module, rank0_only=rank0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over whole tensors, or this rank's rows."""
        return self.module.load_state_dict(state_dict, strict, assign)

    @staticmethod
    def fsdp_modules(module: nn.Module) -> list[nn.Module]:
        """The modules that are units."""
        return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


_ACCEPTED = {"backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"}


def _check_options(options: Mapping[str, Any]) -> None:
    if unknown := sorted(set(options) - _ACCEPTED):
        raise TypeError(f"FullyShardedDataParallel got an unexpected argument {unknown[0]!r}")


def _resolve(strategy: str, process_group: Any, mesh: Any) -> tuple[Any, bool | None]:
    match strategy:
        case "NO_SHARD":
            group = process_group or (mesh.get_group() if mesh is not None else dist.group.WORLD)
            return (None, group), None
        case "SHARD_GRAD_OP" | "_HYBRID_SHARD_ZERO2":
            return process_group, False
        case "HYBRID_SHARD" if not isinstance(process_group, tuple) and mesh is None:
            raise ValueError(
                "HYBRID_SHARD needs process_group=(shard group, replicate group), or a mesh of two dimensions"
            )
        case _:
            return process_group, None


def _chosen(module: nn.Module, policy: Any) -> list[nn.Module]:
    if policy is None:
        return []
    rule = policy if callable(policy) else by_class(policy)
    return [inner for inner in modules_to_shard(module, rule) if not isinstance(inner, FSDPModule)]


def _ignored(
    modules: Collection[nn.Module] | None, states: Collection[nn.Parameter | nn.Module] | None
) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for item in (*(modules or ()), *(states or ())):
        found += [item] if isinstance(item, nn.Parameter) else list(item.parameters())
    return found
