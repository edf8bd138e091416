"""What the ranks of a reducer exchange, and how: the reducer says when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ..collective_error import CollectiveError
from ..transport.base import Pending, TorchTransport, Transport
from .bucket import Bucket, SparseBucket
from .grad_bucket import GradBucket
from .sparse import SparseSum

CommHook = Callable[[Any, Any], Future[Any]]
Handle = Pending | Future[Any]


class Communication:
    """The collectives of one group.

    Args:
        group: the ranks.
        make_transport: chooses how buckets are reduced; all ranks of the group must be there when it is called.

    Attributes:
        comm_hook: the user's way to reduce a bucket, and its state.
    """

    def __init__(self, group: dist.ProcessGroup, make_transport: Callable[[], Transport]) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.comm_hook: tuple[Any, CommHook] | None = None
        self._make_transport = make_transport
        self._transport: Transport | None = None

    # The transport

    def choose_transport(self) -> Transport:
        """Choose how buckets are reduced, if that is not done; all ranks of the group must be there for it."""
        if self._transport is None:
            self._transport = self._make_transport()
        return self._transport

    @property
    def transport_name(self) -> str:
        """How buckets are reduced; empty as long as that is not chosen."""
        return "" if self._transport is None else self._transport.name

    def source_of_buffers(self) -> Transport:
        """What allocates buckets."""
        transport = self.choose_transport()
        # Hooks reduce by collectives of their own, and may resize a buffer: plain memory is best for them.
        return transport if self.comm_hook is None else TorchTransport(self.group, on_cpus=False)

    def watch(self, work: Work) -> Pending:
        """A collective under way whose waiters notice that another rank gave up."""
        return self.choose_transport().watch(work)

    def give_up(self) -> None:
        """Let ranks that wait for this one know that they wait in vain."""
        if self._transport is not None:
            self._transport.give_up()

    def close(self) -> None:
        """Give back what the transport holds."""
        if self._transport is not None:
            self._transport.close()

    # Collectives

    def launch(self, bucket: Bucket | SparseBucket, *, is_last: bool) -> Handle:
        """Begin to reduce a bucket."""
        if isinstance(bucket, SparseBucket):
            assert bucket.gradient is not None
            return SparseSum(bucket.gradient, self.group, self.watch)
        if self.comm_hook is not None:
            state, hook = self.comm_hook
            future: Future[Any] = hook(state, GradBucket(bucket, is_last=is_last))
            return future
        return self.choose_transport().all_reduce(bucket.flat)

    def finish(self, bucket: Bucket | SparseBucket, handle: Handle | None) -> None:
        """Wait until a bucket holds what it was reduced to; without a handle it was not reduced.

        Raises:
            RuntimeError: it never will.
        """
        if handle is None:
            return
        result: Any = handle.wait()
        if isinstance(bucket, SparseBucket):
            bucket.gradient = result
            return
        if self.comm_hook is not None:
            reduced = result[0] if isinstance(result, list | tuple) else result
            if isinstance(reduced, Tensor) and reduced.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(reduced.view(-1))

    def from_first_rank(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The first rank's ``numbers``; every rank gives as many.

        Raises:
            RuntimeError: the broadcast failed.
        """
        told = torch.tensor(numbers, device=device)
        source = dist.get_global_rank(self.group, 0)
        self.watch(dist.broadcast(told, src=source, group=self.group, async_op=True)).wait()
        agreed: list[int] = told.tolist()
        return agreed

    def error(self, kind: type[CollectiveError], sentence: str, *, collective: str = "all_reduce") -> CollectiveError:
        """An error that knows where it happened."""
        return kind(sentence, collective=collective, rank=self.rank, world_size=self.world_size)
