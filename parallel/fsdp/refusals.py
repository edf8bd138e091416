"""Names of torch's FSDP classes that ours do not serve: each says so, in one sentence, when it is used."""

from __future__ import annotations

from typing import Any

from dlaunch.errors import UsageError

OF_THE_WRAPPER = (
    "flatten_sharded_optim_state_dict",
    "register_comm_hook",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
)
OF_MODULES = (
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
)


def refused(what: str) -> UsageError:
    """The error about something that only torch's own class does."""
    return UsageError(f"{what} is not in dlaunch's FSDP.", "Leave it out, or take torch's: without --parallel fsdp.")


def refuse(owner: type, name: str) -> None:
    """Give a class a method of this name that refuses."""

    def method(*_: Any, **__: Any) -> Any:
        raise refused(f"{owner.__name__}.{name}")

    method.__name__, method.__doc__ = name, "Raise UsageError: only torch's class has it."
    setattr(owner, name, staticmethod(method))
