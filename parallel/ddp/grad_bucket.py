"""What a communication hook is given: the interface of torch's ``GradBucket`` over one of our buckets."""

from __future__ import annotations

from torch import Tensor

from .bucket import Bucket


class GradBucket:
    """A bucket as ``register_comm_hook`` shows it. Gradients in it are sums of this rank, not divided by the world."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.flat

    def index(self) -> int:
        """The bucket's place in the order of reductions; the first one reduced is 0."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients, flat: shape ``(sum of numels,)``."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """One view of the bucket for each parameter, with its shape."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of `buffer` for the hooks that come after."""
        self._buffer = buffer
