"""DistributedDataParallel: the same model on every rank, gradients averaged while the backward runs.

This file is the public face: arguments, the forward and what surrounds it. How gradients are averaged is in
``reducer.py``, which buckets there are in ``bucket_layout.py``, how a bucket is summed in ``transport.py``.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..transport.choice import choose_transport
from .arguments import builtin_hook, check_parameters, resolve_device_ids, resolve_group
from .bucket_builder import Member
from .bucket_layout import bucket_caps
from .buffers import BufferHook, BufferHookTime, shared_buffers, sparse_parameter_ids
from .communication import CommHook, Communication
from .graph import find_tensors, reachable_leaves, refuse_distributed_autograd
from .join import DDPJoinHook, anyone_reduces, find_common_rank, take_divisor
from .logging_data import logging_data
from .mixed_precision import MixedPrecision
from .optimizer_state import broadcast_optimizer_state
from .reducer import Reducer, ReducerOptions
from .shared_state import agree_on_source, agree_on_state, take_buffers


class DistributedDataParallel(nn.Module, Joinable):
    """Average a module's gradients over the ranks of a process group, overlapped with the backward.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: arguments, semantics and state dict are the same. What
    differs is written in docs/reference/parallel-ddp.md.

    Args:
        module: the model; all ranks build it alike.
        device_ids: the one device of a module on one accelerator; inputs are moved there.
        output_device: kept for torch's signature; outputs stay where the module makes them.
        dim: kept for torch's signature.
        broadcast_buffers: torch's older name of ``forward_sync_buffers``; ``False`` also leaves them out at the start.
        init_sync: at the start, compare the models and take the state of the group's first rank.
        process_group: the ranks; the default group if ``None``.
        bucket_cap_mb: size of a bucket in MiB; by default 1 for the first and 25 for the rest.
        find_unused_parameters: the outputs do not depend on all parameters in every iteration.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: gradients are views of the buckets (the default here): no second copy of them.
        static_graph: every backward is like the first one.
        delay_all_reduce_named_params: these parameters are reduced last.
        param_to_hook_all_reduce: must be given with ``delay_all_reduce_named_params``.
        mixed_precision: a `MixedPrecision` (or torch's private policy).
        device_mesh: a mesh of one dimension, in the place of ``process_group``.
        skip_all_reduce_unused_params: with ``find_unused_parameters``, do not reduce buckets that no rank uses;
            all ranks must leave out the same parameters.
        bucket_cap_mb_list: the size of each bucket in MiB; the last one holds for those that follow.
        batched_grad_copy: has no effect: gradients are scaled and copied in one pass each as they come.
        forward_sync_buffers: take the buffers of the first rank before each forward; ``None`` is ``True``.
        transport: ``"auto"``, ``"torch"`` or ``"shared_memory"``; ``None`` takes the variable
            ``DLAUNCH_DDP_TRANSPORT`` and then ``"auto"``: shared memory if all ranks are on one host and on CPUs.

    Raises:
        RuntimeError: the ranks' models differ, or no parameter needs a gradient.
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        if check_reduction:
            warnings.warn("The `check_reduction` argument is deprecated and has no effect.", FutureWarning, 2)
        self.module = module
        self.process_group = resolve_group(process_group, device_mesh)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = [name for name, _ in delay_all_reduce_named_params or ()]
        check_parameters(module, [parameter for _, parameter in self._managed_parameters()])
        devices = {parameter.device for _, parameter in self._managed_parameters()}
        self.device_ids = resolve_device_ids(device_ids, output_device, devices)
        self.output_device = output_device if self.device_ids else None
        self.device = self._managed_parameters()[0][1].device
        self.dim = dim
        self.forward_sync_buffers = (
            (broadcast_buffers is not False) if forward_sync_buffers is None else (forward_sync_buffers)
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = MixedPrecision.of(mixed_precision)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.buffer_hook: BufferHook | None = None
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self._transport_wish = transport or os.environ.get("DLAUNCH_DDP_TRANSPORT", "auto")
        sync_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        if init_sync:
            self._agree_on_state(source=0, with_buffers=sync_buffers)
        self._has_buffers = bool(shared_buffers(module, self.parameters_to_ignore))
        self.mixed_precision.cast_buffers(module)
        self.mixed_precision.prepare(module)
        self.reducer = self._make_reducer()
        if init_sync:
            self.reducer.communication.choose_transport()

    # The forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward of what it returns is reduced, unless this is within `no_sync`."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        output = self.mixed_precision.run(self.module, inputs, kwargs)
        self._after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank: forwards within are not followed by a reduction.

        The first backward of a forward outside averages the sums.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @_disable_dynamo
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if reduces:
            self.reducer.check_finished()
            self._follow_frozen_parameters()
            refuse_distributed_autograd()
        work = Join.notify_join_context(self)
        if work is not None:
            take_divisor(self, work)
        if self.will_sync_module_buffers() and not self._has_buffer_hook(BufferHookTime.POST_FORWARD):
            self._sync_buffers()
        if self._join_config.enable:
            anyone_reduces(self, this_rank=self.require_backward_grad_sync)
        if self.device_ids:
            target = self.device_ids[0]
            moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
                Tensor, lambda tensor: tensor.to(target, non_blocking=True), (inputs, kwargs)
            )
            inputs, kwargs = moved
        self.reducer.times.forward_began()
        return inputs, kwargs

    @_disable_dynamo
    def _after_forward(self, output: Any) -> None:
        self.reducer.times.forward_ended()
        if self.will_sync_module_buffers() and self._has_buffer_hook(BufferHookTime.POST_FORWARD):
            self._sync_buffers()
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = reduces
        if not reduces:
            return
        outputs = list(find_tensors(output))
        self.reducer.prepare(self.reducer.unreached(reachable_leaves(outputs)) if self._walks_graph() else ())
        for tensor in outputs:
            if tensor.grad_fn is not None:
                # A backward that comes by the output is the outermost one: it shall call us when it ends.
                tensor.grad_fn.register_prehook(self.reducer.begin_backward)

    def _walks_graph(self) -> bool:
        return self.find_unused_parameters and not self.static_graph

    def _follow_frozen_parameters(self) -> None:
        """Parameters were frozen or unfrozen since the reducer was made: it is made anew."""
        if [parameter.requires_grad for parameter in self._watched] != self._trained:
            self._replace_reducer()

    # State that ranks share

    def rebuild(
        self,
        process_group: dist.ProcessGroup,
        source: int | None = None,
        *,
        optimizer: Optimizer | None = None,
        joining: bool = False,
    ) -> int:
        """Go on in a new group of ranks, of any size, with the same module.

        Every rank of the new group calls this at the same time, ranks that have just come as well: they construct
        with ``init_sync=False`` and say that they are ``joining``. Parameters, buffers and, where one is given, the
        optimizer's state and settings become those of rank ``source`` of the new group; gradients are dropped. An
        optimizer keeps its hold on the parameters: they stay the same objects.

        Args:
            process_group: the new group.
            source: the rank in the new group whose state is taken; the first that is not joining if ``None``.
            optimizer: of the module's parameters, of the same kind on every rank; all ranks give one, or none does.
            joining: this rank has no state that is worth keeping.

        Returns:
            The rank whose state was taken, for what else the script wants from there (the number of the step).

        Raises:
            RuntimeError: the ranks' models or optimizers differ, or all ranks are joining.
        """
        self.process_group = process_group
        source = agree_on_source(source, joining, self.device, process_group)
        self._agree_on_state(source, with_buffers=True)
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, source, process_group, self.device)
        for _, parameter in self._managed_parameters():
            parameter.grad = None
        self.require_forward_param_sync = True
        self._replace_reducer()
        return source

    def _agree_on_state(self, source: int, with_buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        agree_on_state(self.module, ignored, source, self.process_group, with_buffers=with_buffers)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes the buffers agree."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _sync_buffers(self) -> None:
        if self.buffer_hook is not None:
            self.buffer_hook.run(shared_buffers(self.module, self.parameters_to_ignore))
            return
        self.sync_buffers_from(find_common_rank(self, candidate=True) if self._join_config.enable else 0)

    def sync_buffers_from(self, source: int) -> None:
        """Take the buffers of rank ``source`` of the group."""
        take_buffers(self.module, self.parameters_to_ignore, source, self.reducer.communication)

    def sync_module_from(self, source: int) -> None:
        """Take parameters and, where they are shared, buffers of rank ``source`` of the group."""
        self._agree_on_state(source, with_buffers=self.forward_sync_buffers)

    def _has_buffer_hook(self, when: BufferHookTime) -> bool:
        return self.buffer_hook is not None and self.buffer_hook.when is when

    def register_buffer_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        when: BufferHookTime = BufferHookTime.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` make buffers agree, in the place of a broadcast from the first rank."""
        self.buffer_hook = BufferHook(state, hook, when)

    # Communication hooks

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket; it returns a future of the averaged bucket.

        Torch's own hooks work, and those of ``dlaunch.parallel.ddp.comm_hooks``. Gradients in the bucket are not
        divided by the world size: the hook divides.

        Raises:
            TypeError: ``hook`` cannot be called.
            RuntimeError: there is a hook already.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if "bucket" not in inspect.signature(hook).parameters and len(inspect.signature(hook).parameters) != 2:
            raise ValueError("Communication hook: it takes a state and a bucket: hook(state, bucket).")
        if self.reducer.communication.comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.use_comm_hook(state, hook)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops of different lengths: ranks that have finished mirror the others' collectives.

        Args:
            divide_by_initial_world_size: gradients are divided by the world size even when ranks have finished;
                else by the number of those that still train.
            enable: ``False`` makes the context do nothing.
            throw_on_early_termination: raise on every rank as soon as one has finished.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` context runs on a rank that has finished."""
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where the ``Join`` context's own collectives take place."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the ``Join`` context's own collectives."""
        return self.process_group

    # Making the reducer

    def _make_reducer(self) -> Reducer:
        self._watched = list(self.module.parameters())
        self._trained = [parameter.requires_grad for parameter in self._watched]
        sparse = set(sparse_parameter_ids(self.module))
        members = [Member(name, parameter, id(parameter) in sparse) for name, parameter in self._managed_parameters()]
        options = ReducerOptions(
            caps=self._caps,
            find_unused_parameters=self._walks_graph(),
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            reduce_dtype=self.mixed_precision.reduce_dtype,
        )
        devices = {member.parameter.device for member in members}
        choose = partial(choose_transport, self._transport_wish, self.process_group, devices)
        return Reducer(members, Communication(self.process_group, choose), options)

    def _replace_reducer(self) -> None:
        comm_hook = self.reducer.communication.comm_hook
        self.reducer.remove_hooks()
        self.reducer.communication.close()
        self.reducer = self._make_reducer()
        self.reducer.communication.comm_hook = comm_hook

    def _managed_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are reduced, delayed ones first: the reverse order of the buckets puts them last."""
        managed = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        }
        delayed = [(name, managed.pop(name)) for name in self._delayed if name in managed]
        return [*delayed, *managed.items()]

    # Looking in from outside

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    def logging_data(self) -> dict[str, Any]:
        """What this wrapper is and where its time went; names are torch's, times nanoseconds for one step."""
        return logging_data(self)

    # Names under which torch's users and libraries know these

    _get_ddp_logging_data = logging_data

    _register_buffer_comm_hook = register_buffer_hook

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        self.register_comm_hook(self.process_group, builtin_hook(kind))

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _set_static_graph(self) -> None:
        if not self.static_graph:
            self.static_graph = True
            self._replace_reducer()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self.rebuild(new_process_group)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: list[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    # Copies and pickles: without the group, which is the default one again where they are made whole

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        state = self.__dict__.copy()
        state["_comm_hook"] = state.pop("reducer").communication.comm_hook
        del state["process_group"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        comm_hook = state.pop("_comm_hook")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = resolve_group(None, None)
        self.reducer = self._make_reducer()
        self.reducer.communication.comm_hook = comm_hook
