"""Checkpoints: save a job's state so that no crash can lose the last good one, and find it again.

    from dlaunch import checkpoint

    objects = {"model": model, "optimizer": optimizer, "sampler": sampler}
    found = checkpoint.load("checkpoints", into=objects)
    step = found.step if found else 0
    with checkpoint.Saver("checkpoints", keep_last=3) as saver:
        ...
        saver.save(objects, step)

A checkpoint is a directory that gets its name when all of it is on the disk (``manifest.py``). Nothing is
read with a pickle that could run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..agreement import from_first_rank, largest, rank_and_size
from ..collective_error import told
from .atomic_file import ChecksummedFile, sync_directory, write_durably
from .dcp import export_dcp, import_dcp
from .error import CheckpointError, DamagedCheckpoint, DamagedCheckpointWarning
from .manifest import Published
from .random_state import RandomState
from .reader import Checkpoint, latest, open_checkpoint
from .request import CheckpointRequest
from .saver import Saver
from .shards import assemble, shard
from .state import State, restore

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointRequest",
    "DamagedCheckpoint",
    "DamagedCheckpointWarning",
    "Loaded",
    "RandomState",
    "Saver",
    "assemble",
    "consolidate",
    "export_dcp",
    "import_dcp",
    "latest",
    "load",
    "save",
    "shard",
]

_NONE, _FOUND, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What ``load`` read."""

    checkpoint: Checkpoint
    state: dict[str, Any]  # what all ranks share
    sharded: dict[str, Any] | None  # what this rank had; None if the world had another size, or nothing was sharded

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.checkpoint.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given to ``save`` as metadata."""
        return self.checkpoint.metadata


def save(
    directory: str | os.PathLike[str],
    state: State | None,
    step: int,
    *,
    sharded: State | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save one checkpoint and return when it is published, on every rank (arguments as for ``Saver``).

    Raises:
        CheckpointError: it was not; what was there before is untouched.
    """
    with Saver(directory, keep_last=keep_last, background=False, process_group=process_group) as saver:
        saver.save(state, step, sharded=sharded, metadata=metadata)


def load(
    directory: str | os.PathLike[str],
    into: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    sharded_into: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Read the last good checkpoint, the same one on every rank; call it on every rank.

    Args:
        directory: where checkpoints are saved.
        into: objects with ``load_state_dict``, under the names that they were saved with. Modules may be wrapped
            otherwise than when they were saved (``module.``, ``_orig_mod.``).
        step: that of this step instead of the last.
        sharded_into: the same for what this rank had for itself; left alone if the world had another size.
        process_group: the ranks of the job; the default group if ``None``.

    Returns:
        None if nothing was ever saved there (``into`` is untouched). Tensors are in host memory.

    Raises:
        CheckpointError: no checkpoint is whole, or it does not fit ``into``.
        CollectiveError: another rank died, or did not come; see ``collective_error``.
    """
    rank, world_size = rank_and_size(process_group)
    while True:
        with told("checkpoint.load", process_group):
            chosen = _chosen(Path(directory), step, rank, process_group)
        if chosen is None:
            return None
        try:
            own = chosen.read_shard(rank) if chosen.is_sharded and chosen.world_size == world_size else None
            loaded = Loaded(chosen, chosen.read_state(), own)
            break
        except FileNotFoundError:
            if world_size > 1 or chosen.path.exists():
                raise CheckpointError(f"{chosen.path} lost a file while it was read.", "Load again.") from None
            # else a job that saves into this directory has deleted it as superfluous: there is a newer one
    restore(into or {}, loaded.state)
    if own is not None:
        restore(sharded_into or {}, own, "sharded")
    return loaded


def _chosen(directory: Path, step: int | None, rank: int, group: dist.ProcessGroup | None) -> Checkpoint | None:
    """The first rank looks for the last good one and verifies it; the others open the one that it found."""
    found: Checkpoint | None = None
    problem: CheckpointError | None = None
    if rank == 0:
        try:
            found = latest(directory, step=step)
        except CheckpointError as error:
            problem = error
    verdict = _FAILED if problem else _FOUND if found else _NONE
    name = found.name if found else Published(0, 0)
    verdict, sequence, found_step = from_first_rank([verdict, name.sequence, name.step], group)
    if verdict == _FOUND and rank != 0:
        try:
            found = open_checkpoint(directory / str(Published(sequence, found_step)), verify=False)
        except (FileNotFoundError, DamagedCheckpoint) as error:
            problem = CheckpointError(
                f"Rank {rank} cannot read the checkpoint that rank 0 found: {error}.",
                "The directory must be on a file system that all nodes share.",
            )
    if problem is None and largest([verdict == _FAILED or problem is not None], group)[0]:
        problem = CheckpointError("The checkpoint was not loaded: another rank cannot read it.")
    elif problem is not None:
        largest([True], group)
    if problem is not None:
        raise problem
    return found


def consolidate(checkpoint: Checkpoint, file: str | os.PathLike[str]) -> None:
    """Write a checkpoint into one file that plain ``torch.load(weights_only=True)`` reads, shards joined.

    Args:
        checkpoint: as ``latest`` found it.
        file: must not exist.

    Raises:
        CheckpointError: the shards do not add up.
        FileExistsError: there is such a file.
        OSError: it could not be written; then there is no such file.
    """
    target = Path(file)
    if target.exists():
        raise FileExistsError(f"{target} exists")
    whole = checkpoint.read_whole()
    unnamed = target.with_name(f".{target.name}.{os.getpid()}.new")

    def write(content: ChecksummedFile) -> None:
        torch.save(whole, content)  # type: ignore[arg-type]  # it needs write() and flush() only

    try:
        write_durably(unnamed, write)
        unnamed.rename(target)
        sync_directory(target.parent)
    finally:
        unnamed.unlink(missing_ok=True)
