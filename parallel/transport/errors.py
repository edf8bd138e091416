"""What can go wrong with a reduction, in sentences that name parameters and ranks.

torch's wording is kept where there is one, for those who search for it.
"""

from __future__ import annotations

from collections.abc import Sequence


def unfinished(rank: int, missing: Sequence[str]) -> str:
    """A backward ended, and a new forward begins, without a gradient for ``missing``."""
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"Parameters which did not receive grad for rank {rank}: {', '.join(missing)}. "
        "If the loss does not use them in every iteration, pass find_unused_parameters=True; "
        "if the module returned outputs that the loss left out, use them or do not return them."
    )


def ready_twice(name: str) -> str:
    """The gradient of ``name`` came once more than expected."""
    return (
        f"Expected to mark a variable ready only once, but the gradient of {name} came again in one backward. "
        "A re-entrant checkpoint that is used more than once, or a parameter shared between re-entrant checkpoints, "
        "does that: pass static_graph=True or checkpoint with use_reentrant=False."
    )


def not_reduced(rank: int, what: str, error: Exception) -> str:
    """A collective failed in the middle of a backward."""
    return f"Rank {rank} could not reduce {what}: {error}. Parameters are unchanged, gradients were dropped."


def invalid_gradients(reason: Exception) -> str:
    """A forward begins after a reduction that failed."""
    return (
        f"The gradients are invalid since a reduction failed ({reason}) "
        "Call rebuild(process_group) with a group of the ranks that live before the next forward."
    )
