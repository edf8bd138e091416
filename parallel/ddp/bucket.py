"""One bucket of gradients: a flat buffer and a view of it for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        index: the bucket's place in the order of reductions.
        members: the reducer's numbers of its parameters.
        flat: the buffer, shape ``(sum of numels,)``.
        views: for each member a view of ``flat`` with the parameter's shape and strides.
        missing: how many members have no gradient yet in this backward.
        scale: what gradients are multiplied by, a tensor without dimensions (it costs half of what a number does);
            ``None`` for one.
    """

    gradient: Tensor | None = None  # only a sparse bucket has one

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        self.index = index
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self.flat = flat
        self.views = _views(flat, parameters)
        self.missing = len(members)
        self.scale: Tensor | None = None

    def begin(self, scale: float) -> None:
        """A backward begins, whose gradients are multiplied by ``scale``."""
        self.missing = len(self.members)
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=self.flat.dtype)

    def take_unusual(self, view: Tensor, gradient: Tensor | None) -> None:
        """No gradient, a sparse one where dense ones were expected, or one from ``backward(create_graph=True)``."""
        if gradient is None:
            view.zero_()
            return
        view.copy_(gradient.detach().to_dense() if gradient.is_sparse else gradient.detach())
        if self.scale is not None:
            view.mul_(self.scale)


class SparseBucket:
    """A bucket of one parameter whose gradients are sparse; there is no buffer, the gradient itself is reduced."""

    scale = None

    def __init__(self, index: int, member: int, parameter: nn.Parameter) -> None:
        self.index = index
        self.members = (member,)
        self.parameters = (parameter,)
        self.views = (None,)
        self.missing = 1
        self.gradient: Tensor | None = None

    def begin(self, _: float) -> None:
        """A backward begins."""
        self.missing = 1
        self.gradient = None

    def take(self, divisor: int) -> None:
        """Take the parameter's gradient, divided by the number of ranks; no gradient counts as no rows."""
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(parameter.dim() - 1 or 1)
        self.gradient = (gradient.detach() / divisor).coalesce()


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [_shaped_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _shaped_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """The parameter's own strides where they are a permutation of dense ones: optimizers are faster for it."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return piece.as_strided(parameter.size(), parameter.stride())
    return piece.view(parameter.shape)
