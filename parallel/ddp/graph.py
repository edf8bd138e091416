"""What a module's outputs lead back to: tensors in nested outputs, and the parameters that a backward can reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributed import autograd as distributed_autograd
from torch.distributed import rpc


def find_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples, sets, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))


def reachable_leaves(outputs: Iterable[Tensor]) -> set[int]:
    """``id`` of each leaf tensor that gets a gradient when all ``outputs`` are differentiated."""
    leaves = {id(output) for output in outputs if output.is_leaf and output.requires_grad}
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)  # only the nodes that accumulate into a leaf have one
        if variable is not None:
            leaves.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves


def refuse_distributed_autograd() -> None:
    """Gradients of a distributed autograd pass never come to the parameters, so nothing would be averaged.

    Raises:
        RuntimeError: the forward runs within ``torch.distributed.autograd.context()``.
    """
    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return
    try:
        distributed_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return
    raise RuntimeError(
        "This DistributedDataParallel cannot average gradients of torch.distributed.autograd, which never reach the "
        "parameters. Use torch's own: without --parallel ddp a script gets it."
    )
