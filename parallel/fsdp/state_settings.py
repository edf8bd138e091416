"""What ``FSDP.state_dict_type`` sets: in which form a wrapper's state dicts are made. torch's own values are taken.

torch's FullyShardedDataParallel has three forms (torch 2.13, distributed/fsdp/api.py): full, sharded, and local, which
is one flat parameter for each unit. Ours has no flat parameters, so there is no local form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dlaunch.errors import UsageError

from .refusals import refused


class StateSettings(NamedTuple):
    """What was asked for.

    Attributes:
        sharded: each rank's part as DTensors; else whole tensors.
        rank0_only: whole tensors on the first rank only.
        to_host: in host memory.
        optimizer_rank0_only: the same for optimizer state.
        kind: torch's ``StateDictType``, or ``None`` if nothing was set.
        config: torch's, for the model.
        optimizer_config: torch's, for the optimizer.
    """

    sharded: bool = False
    rank0_only: bool = False
    to_host: bool = True
    optimizer_rank0_only: bool = False
    kind: Any = None
    config: Any = None
    optimizer_config: Any = None


def settings_of(kind: Any, config: Any = None, optimizer_config: Any = None) -> StateSettings:
    """torch's values as ours.

    Raises:
        UsageError: the local form, or a config that belongs to another form.
    """
    name = getattr(kind, "name", str(kind))
    if name == "LOCAL_STATE_DICT":
        raise refused("StateDictType.LOCAL_STATE_DICT")
    form = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded"}.get(name)
    if form is None:
        raise UsageError(f"{kind!r} is no StateDictType.", "Give FULL_STATE_DICT or SHARDED_STATE_DICT.")
    for given in (config, optimizer_config):
        if given is not None and not type(given).__name__.startswith(form):
            raise UsageError(f"a {type(given).__name__} does not go with {name}.", f"Give a {form}StateDictConfig.")
    return StateSettings(
        sharded=form == "Sharded",
        rank0_only=bool(getattr(config, "rank0_only", False)),
        to_host=bool(getattr(config, "offload_to_cpu", False)),
        optimizer_rank0_only=bool(getattr(optimizer_config, "rank0_only", False)),
        kind=kind,
        config=config,
        optimizer_config=optimizer_config,
    )


def as_torchs(settings: StateSettings) -> Any:
    """torch's ``StateDictSettings``, with its defaults where nothing was given."""
    from torch.distributed.fsdp import api  # noqa: PLC0415  -- slow to import, seldom needed

    kind = settings.kind or api.StateDictType.FULL_STATE_DICT
    form = "Sharded" if settings.sharded else "Full"
    return api.StateDictSettings(
        kind,
        settings.config or getattr(api, f"{form}StateDictConfig")(),
        settings.optimizer_config or getattr(api, f"{form}OptimStateDictConfig")(),
    )
