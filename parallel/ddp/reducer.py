"""From gradients to averaged gradients, while the backward still runs.

[Note: a backward, step by step]
1. The first gradient that is ready starts the reduction and asks autograd for a call at the end of the backward.
2. Each gradient is scaled by 1/world into its view of a bucket. A bucket that has all of its gradients is reduced as
   soon as those before it are: all ranks reduce the same buckets in the same order.
3. At the end of the backward we wait for the reductions. Whoever called ``backward()`` sees averaged gradients.

[Note: gradients that do not come]
With ``find_unused_parameters``, what the outputs do not lead to counts as ready at once, and what has not come by the
end of the backward as ready then. An all_reduce of one flag for each parameter tells whether any rank used it; if none
did, its gradient stays as it was. With ``static_graph`` the first backward is watched and nothing is reduced before its
end; later ones are expected to be like it. Without either, the reduction stays open: a later backward may bring the
rest, and the next forward complains.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..collective_error import CollectiveError, kind_of
from ..transport.errors import invalid_gradients, not_reduced, ready_twice, unfinished
from .bucket import Bucket, SparseBucket
from .bucket_builder import BucketBuilder, Member
from .bucket_layout import Layout
from .communication import CommHook, Communication, Handle
from .graph import reachable_leaves
from .step_times import StepTimes
from .usage_flags import UsageFlags

_FLAGS = "the flags of unused parameters"  # which are reduced after the last bucket


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How gradients are reduced; the fields are those of ``DistributedDataParallel``."""

    caps: Sequence[int]
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    skip_all_reduce_unused_params: bool = False
    reduce_dtype: torch.dtype | None = None


class Reducer:
    """Averages the gradients of ``members`` over the ranks of a group in each backward whose forward asked for it.

    Attributes:
        failed: why the last reduction failed, if it did; the gradients are invalid until the reducer is replaced.
        divisor: what sums are divided by, the world size but for uneven inputs.
    """

    def __init__(
        self,
        members: Sequence[Member],
        communication: Communication,
        options: ReducerOptions,
    ) -> None:
        self.members = list(members)
        self.options = options
        self.communication = communication
        self.failed: CollectiveError | None = None
        self.divisor = communication.world_size
        self.times = StepTimes()
        self.has_rebuilt = False
        self.ever_unused = False
        self.buckets: list[Bucket | SparseBucket] = []
        self._builder = BucketBuilder(self.members, options.caps, options.reduce_dtype)
        self._place: dict[int, Any] = {}  # of a member: bucket, view of it, parameter
        self._parameters = [member.parameter for member in self.members]
        self._device = self._parameters[0].device
        self._as_views = options.gradient_as_bucket_view and options.reduce_dtype is None
        self._flags = UsageFlags(self._device, communication.group, communication.watch, keep=options.static_graph)
        self._sparse = [index for index, member in enumerate(self.members) if member.sparse]
        self._learning = options.static_graph
        self._expected = [1] * len(self.members)  # times that each gradient comes in one backward
        self._unused_by_graph: list[int] = []
        self._forward_waits = False  # a forward has run, and no backward that was reduced since
        self._output_reached = False  # this backward came by an output of the module
        self._callback_queued = False
        self._open = False  # a reduction has begun and is not finished
        self._used = [False] * len(self.members)
        self._reset()
        count = len(self.members)
        self.layout: Layout = self._builder.lay_out(range(count - 1, -1, -1))
        self.initial_layout = self.layout
        self._hooks = [self._hook(index, parameter) for index, parameter in enumerate(self._parameters)]

    # Before a backward

    def prepare(self, unused: Iterable[int] = ()) -> None:
        """A forward has run whose backward is to be reduced; ``unused`` are the members that it does not lead to."""
        unused = set(unused)
        if self._forward_waits:  # several forwards before a backward: absent is what none of them leads to
            unused &= set(self._unused_by_graph)
        self._ensure_buckets()  # here, where all ranks are: a backward may hold other collectives
        self._forward_waits = True
        self._output_reached = self._callback_queued = False  # a backward that raised never made its call
        self._unused_by_graph = sorted(unused)

    def use_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket from the next backward on."""
        self.communication.comm_hook = (state, hook)
        self.buckets, self._place = [], {}

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """As torch's reducer has it, for those who call it themselves (Accelerate does): reduce the next backward.

        ``outputs`` say which parameters it will not reach; none of them means that it reaches all.
        """
        self.prepare(self.unreached(reachable_leaves(outputs)) if outputs else ())

    def begin_backward(self, *_: Any) -> None:
        """Called when a backward reaches the module's output: the outermost backward, where there are nested ones."""
        self._output_reached = True
        self._queue_callback()

    def unreached(self, leaves: set[int]) -> list[int]:
        """The members that are not among ``leaves`` (``id`` of parameters)."""
        return [index for index, parameter in enumerate(self._parameters) if id(parameter) not in leaves]

    def check_finished(self) -> None:
        """Raise if the last backward left gradients that were not averaged."""
        if self.failed is not None:
            raise self.communication.error(kind_of(self.failed), invalid_gradients(self.failed))
        if self._open:
            self.communication.give_up()
            missing = [member.name for member, left in zip(self.members, self._left, strict=True) if left > 0]
            raise RuntimeError(unfinished(self.communication.rank, missing))

    def remove_hooks(self) -> None:
        """Leave the parameters as if there had been no reducer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # During a backward

    def _hook(self, index: int, parameter: nn.Parameter) -> Any:
        # Weak, so that a wrapper that its user drops takes the reducer, its buffers and the group with it.
        myself = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            reducer = myself()
            if reducer is not None:
                reducer._on_gradient(index)

        return parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, index: int) -> None:
        # The one function that runs for every gradient: it is written for speed.
        self._used[index] = True
        if not (self._open and self._callback_queued) and not self._join_backward():
            return
        left = self._left[index] = self._left[index] - 1
        if left or self._learning:
            self._on_repeated_gradient(index, left)
            return
        self._order.append(index)
        self._mark_ready(index)

    def _join_backward(self) -> bool:
        """Make sure that this backward is being reduced; return whether it is to be."""
        if not self._open:
            if not (self._forward_waits or self._output_reached):
                return False
            self._open_reduction()
        self._queue_callback()
        return True

    def _on_repeated_gradient(self, index: int, left: int) -> None:
        if self._learning:
            self._order.append(index)
        elif left < 0:
            raise RuntimeError(ready_twice(self.members[index].name))

    def _queue_callback(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._on_backward_end)

    def _open_reduction(self) -> None:
        self._ensure_buckets()
        self._open = True
        self._forward_waits = False
        self._reset()
        scale = 1.0 if self.communication.comm_hook is not None else 1.0 / self.divisor
        for bucket in self.buckets:
            bucket.begin(scale)
        self.times.backward_began()
        if self._learning:
            return
        absent = self._unused_by_graph if self.options.find_unused_parameters else []
        for index, times in enumerate(self._expected):
            if times == 0:
                self._mark_absent(index)
        for index in absent:
            self._mark_absent(index)

    def _reset(self) -> None:
        """What belongs to one reduction."""
        self._order: list[int] = []  # in which gradients came
        self._left = list(self._expected)  # times that each gradient is still to come
        self._handles: list[Handle | None] = []  # of buckets, in their order
        self._flags.forget()
        self._kept: dict[int, Tensor | None] = {}  # gradients as they were, of members that this rank did not use

    def _mark_absent(self, index: int) -> None:
        """This rank has no gradient of the member in this backward; it may have one from earlier, without sync."""
        self._left[index] = 0
        if not self._used[index]:
            self.ever_unused = True
            gradient = self._parameters[index].grad
            own_view = gradient is not None and gradient is self._place[index][1]
            self._kept[index] = gradient.clone() if gradient is not None and own_view else gradient
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        bucket, view, parameter = self._place[index]
        gradient = parameter.grad
        if view is None:
            bucket.take(self.divisor)
        else:
            scale = bucket.scale
            if gradient is view:
                if scale is not None:
                    view.mul_(scale)
            elif gradient is None or gradient.is_sparse or gradient.requires_grad:
                bucket.take_unusual(view, gradient)
            elif scale is None:
                view.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=view)
            if self._as_views and index not in self._kept:
                parameter.grad = view
        bucket.missing -= 1
        if not bucket.missing:
            self._launch_ready()

    def _launch_ready(self) -> None:
        try:
            while len(self._handles) < len(self.buckets) and self.buckets[len(self._handles)].missing == 0:
                self._handles.append(self._launch(self.buckets[len(self._handles)]))
            if len(self._handles) == len(self.buckets) and self._wants_flags():
                self._flags.ask(self._used)
        except RuntimeError as error:
            self._fail(error, self._name_bucket(len(self._handles)))

    def _launch(self, bucket: Bucket | SparseBucket) -> Handle | None:
        self.times.communication_began()
        if isinstance(bucket, Bucket) and (bucket.flat.numel() == 0 or self._can_skip(bucket)):
            return None
        return self.communication.launch(bucket, is_last=bucket is self.buckets[-1])

    def _can_skip(self, bucket: Bucket) -> bool:
        return self.options.skip_all_reduce_unused_params and all(index in self._kept for index in bucket.members)

    def _wants_flags(self) -> bool:
        return self.options.find_unused_parameters or self._learning

    # At the end of a backward

    def _on_backward_end(self) -> None:
        output_reached, self._output_reached = self._output_reached, False
        self._callback_queued = False
        if not self._open:
            nothing_used = self.options.find_unused_parameters and len(self._unused_by_graph) == len(self.members)
            if not (output_reached and nothing_used):
                return  # nothing of ours was differentiated: autograd.grad() of an input, for instance
            self._open_reduction()
        if self._learning:
            self._reduce_what_was_learned()
        elif self.options.find_unused_parameters:
            for index, left in enumerate(self._left):
                if left:
                    self._mark_absent(index)
        if len(self._handles) == len(self.buckets):
            self._finish()

    def _reduce_what_was_learned(self) -> None:
        self._expected = [expected - left for expected, left in zip(self._expected, self._left, strict=True)]
        last_times = {index: place for place, index in enumerate(self._order)}
        self._order = sorted(last_times, key=last_times.__getitem__)
        for index, times in enumerate(self._expected):
            if times:
                self._mark_ready(index)
            else:
                self._mark_absent(index)

    def _finish(self) -> None:
        self.times.backward_ended()
        for number, (bucket, handle) in enumerate(zip(self.buckets, self._handles, strict=True)):
            try:
                self.communication.finish(bucket, handle)
            except RuntimeError as error:
                self._fail(error, self._name_bucket(number))
        try:
            used_somewhere = self._flags.answer()
        except RuntimeError as error:
            self._fail(error, _FLAGS)
        for index in self._without_gradient():
            self._hand_over(index, self._parameters[index], used_somewhere is None or used_somewhere[index])
        self.times.communication_ended()
        rebuild = not self.has_rebuilt and not self.options.find_unused_parameters
        self._learning = False
        self._open = False
        self._used = [False] * len(self.members)
        order = self._order
        self._reset()  # handles hold buffers
        if rebuild:
            self._rebuild(order)

    def _without_gradient(self) -> Iterable[int]:
        """The members that still have to be given what was reduced; a view that is the gradient has it already."""
        if not self._as_views:
            return range(len(self.members))
        return [*self._kept, *(index for index in self._sparse if index not in self._kept)]

    def _hand_over(self, index: int, parameter: nn.Parameter, used: bool) -> None:
        """Give a parameter its averaged gradient, or leave the one that it had if no rank used it."""
        bucket, view, _ = self._place[index]
        if index in self._kept and not used:
            kept = self._kept[index]
            if kept is not None and parameter.grad is not None and parameter.grad is view:
                parameter.grad.copy_(kept)
        elif view is None:
            parameter.grad, bucket.gradient = bucket.gradient, None
        elif self._as_views:
            parameter.grad = view
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = view.to(parameter.dtype, copy=True)
        else:
            with torch.no_grad():
                parameter.grad.copy_(view)

    def reduce_nothing(self) -> None:
        """Take part with zeros in one reduction of the other ranks, as a rank that has run out of inputs does."""
        self._ensure_buckets()
        self._reset()
        for bucket in self.buckets:
            if isinstance(bucket, SparseBucket):
                bucket.parameters[0].grad = None
                bucket.take(self.divisor)
            else:
                bucket.flat.zero_()
            self._handles.append(self._launch(bucket))
        self._used = [False] * len(self.members)
        if self._wants_flags():
            self._flags.ask(self._used)
        for bucket, handle in zip(self.buckets, self._handles, strict=True):
            self.communication.finish(bucket, handle)
        self._flags.answer()
        self._learning = False
        if not self.has_rebuilt and not self.options.find_unused_parameters:
            self._rebuild([])

    def _name_bucket(self, number: int) -> str:
        if number == len(self.buckets):
            return _FLAGS
        names = ", ".join(self.members[index].name for index in self.buckets[number].members)
        return f"bucket {number} ({names})"

    def _fail(self, error: RuntimeError, what: str) -> NoReturn:
        """Drop all gradients, so that an optimizer's step changes nothing, and say what could not be reduced."""
        for parameter in self._parameters:
            parameter.grad = None
        self.communication.give_up()
        sentence = not_reduced(self.communication.rank, what, error)
        self.failed = self.communication.error(kind_of(error), sentence)
        raise self.failed from error

    # Buckets

    def _ensure_buckets(self) -> None:
        """Allocate late: the old buffers have gone with the gradients by now."""
        if self.buckets:
            return
        try:
            self.buckets = self._builder.build(self.layout, self.communication.source_of_buffers())
        except RuntimeError as error:
            self._fail(error, "anything: there are no buckets")
        self._place = self._builder.places(self.buckets)

    def _rebuild(self, order: Sequence[int]) -> None:
        """Lay the buckets out anew in the order that rank 0 saw; the buffers follow with the next backward."""
        seen = set(order)
        missing = [index for index in range(len(self.members) - 1, -1, -1) if index not in seen]
        try:
            agreed = self.communication.from_first_rank([*order, *missing], self._device)
        except RuntimeError as error:
            self._fail(error, "the order of buckets")
        self.has_rebuilt = True
        layout = self._builder.lay_out(agreed)
        if layout != self.layout:
            self.layout = layout
            self.buckets, self._place = [], {}
