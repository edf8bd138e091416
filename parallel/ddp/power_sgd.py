"""PowerSGD: send two thin matrices in the place of each gradient matrix.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
algorithm 1 with error feedback and warm start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .comm_hooks import average
from .grad_bucket import GradBucket


@dataclass
class PowerSGDState:
    """What compression remembers from step to step.

    Attributes:
        process_group: the ranks; the default group if ``None``.
        rank: columns of the thin matrices; more of them are more exact and cost more.
        start_step: so many steps are sent uncompressed, while gradients change fast.
        min_compression_rate: a matrix that would not shrink by this factor is sent as it is.
        seed: of the first guess, the same on all ranks.
        step: steps so far.
    """

    process_group: dist.ProcessGroup | None = None
    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0
    seed: int = 0
    step: int = 0
    errors: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter: what was left out last time
    guesses: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter: Q of the last step


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average matrices by their leading singular directions, and vectors exactly.

    What a step leaves out is added to the next one's gradient, so nothing is lost in the long run.
    """
    compress = state.step >= state.start_step
    if bucket.is_last():
        state.step += 1
    if not compress:
        return average(bucket.buffer(), state.process_group)
    exact: list[Tensor] = []
    targets: list[Tensor] = []
    matrices: list[tuple[Tensor, Tensor]] = []  # (parameter, its gradient as a matrix)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if _is_worth_it(state, gradient):
            matrices.append((parameter, gradient.reshape(gradient.shape[0], -1)))
            targets.append(gradient)
        else:
            exact.append(gradient)
    _average_together(exact, state.process_group)
    approximations = _approximate(state, matrices)
    for target, approximation in zip(targets, approximations, strict=True):
        target.copy_(approximation.view(target.shape))
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _is_worth_it(state: PowerSGDState, gradient: Tensor) -> bool:
    if gradient.dim() < 2 or gradient.numel() == 0 or gradient.is_complex():
        return False
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    return (rows + columns) * state.rank * state.min_compression_rate < rows * columns


def _approximate(state: PowerSGDState, matrices: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """P Q^T of each matrix: P = M Q, averaged and made orthogonal; Q = M^T P, averaged."""
    corrected = []
    for parameter, matrix in matrices:
        error = state.errors.get(parameter)
        corrected.append(matrix.clone() if error is None else matrix + error)
    guesses = [_guess(state, number, parameter, matrix) for number, (parameter, matrix) in enumerate(matrices)]
    lefts = [matrix @ guess for matrix, guess in zip(corrected, guesses, strict=True)]
    _average_together(lefts, state.process_group)
    lefts = [_orthogonal(left) for left in lefts]
    rights = [matrix.t() @ left for matrix, left in zip(corrected, lefts, strict=True)]
    local = [left @ right.t() for left, right in zip(lefts, rights, strict=True)]
    _average_together(rights, state.process_group)
    for (parameter, _), matrix, approximation, right in zip(matrices, corrected, local, rights, strict=True):
        state.errors[parameter] = matrix - approximation
        state.guesses[parameter] = right
    return [left @ right.t() for left, right in zip(lefts, rights, strict=True)]


def _guess(state: PowerSGDState, number: int, parameter: Tensor, matrix: Tensor) -> Tensor:
    if parameter in state.guesses:
        return state.guesses[parameter]
    generator = torch.Generator().manual_seed(state.seed + number)
    columns = min(state.rank, *matrix.shape)
    guess = torch.randn(matrix.shape[1], columns, generator=generator).to(matrix)
    return _orthogonal(guess)


def _orthogonal(matrix: Tensor) -> Tensor:
    orthogonal: Tensor = torch.linalg.qr(matrix.float()).Q.to(matrix.dtype)
    return orthogonal


def _average_together(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(dist.get_world_size(group))
    dist.all_reduce(flat, group=group)
    for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
