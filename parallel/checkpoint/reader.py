"""Finding the last good checkpoint and reading it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .atomic_file import checksum
from .error import CheckpointError, DamagedCheckpoint, DamagedCheckpointWarning
from .manifest import MANIFEST_NAME, STATE_NAME, FileEntry, Manifest, Published, published_in, shard_name
from .plain_load import load_plainly
from .shards import assemble


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint whose files are whole."""

    path: Path
    name: Published
    manifest: Manifest

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.name.step

    @property
    def world_size(self) -> int:
        """Ranks of the world that saved it."""
        return self.manifest.world_size

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user gave to ``save`` as metadata."""
        return self.manifest.metadata

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a file of its own."""
        return self._has(shard_name(0, self.world_size))

    def _has(self, name: str) -> bool:
        return any(entry.name == name for entry in self.manifest.files)

    def read_state(self) -> dict[str, Any]:
        """The state that all ranks share (empty if there is none), in host memory."""
        return self._read(STATE_NAME) if self._has(STATE_NAME) else {}

    def read_shard(self, rank: int) -> dict[str, Any]:
        """What ``rank`` of the world that saved it had for itself (empty if nothing was sharded)."""
        return self._read(shard_name(rank, self.world_size)) if self.is_sharded else {}

    def read_whole(self) -> dict[str, Any]:
        """The shared state and the joined shards of all ranks in one tree (needs memory for all of it)."""
        shards = [self.read_shard(rank) for rank in range(self.world_size)] if self.is_sharded else []
        return assemble([self.read_state(), *shards])

    def _read(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = load_plainly(self.path / name, str(self.path / name))
        return loaded


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at ``path``, after a look at its files.

    Args:
        path: a published directory.
        verify: read all of it and compare checksums; else compare sizes only.

    Raises:
        DamagedCheckpoint: it is not whole; says which file and why.
        FileNotFoundError: there is no such directory (any more).
    """
    name = Published.parse(path.name)
    if name is None:
        raise DamagedCheckpoint(f"{path} does not have the name of a published checkpoint")
    try:
        manifest = Manifest.decode((path / MANIFEST_NAME).read_bytes())
        for entry in manifest.files:
            _check(path / entry.name, entry, verify)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            raise FileNotFoundError(str(path)) from None
        raise DamagedCheckpoint(f"{path} is damaged: {Path(error.filename or path).name}: {error.strerror}") from None
    except DamagedCheckpoint as damage:
        raise DamagedCheckpoint(f"{path} is damaged: {damage.sentence}") from None
    return Checkpoint(path, name, manifest)


def _check(path: Path, entry: FileEntry, verify: bool) -> None:
    size = path.stat().st_size
    if size != entry.size:
        raise DamagedCheckpoint(f"{entry.name} has {size} bytes, not {entry.size}")
    if verify and checksum(path).crc32 != entry.crc32:
        raise DamagedCheckpoint(f"the content of {entry.name} does not agree with its checksum")


def latest(directory: str | os.PathLike[str], *, step: int | None = None, verify: bool = True) -> Checkpoint | None:
    """The good checkpoint that was published last.

    Damaged ones are named in a ``DamagedCheckpointWarning`` each and passed over.

    Args:
        directory: where checkpoints are saved.
        step: only those of this step.
        verify: compare checksums, not sizes only.

    Returns:
        None if nothing (for this step) was ever published there.

    Raises:
        CheckpointError: checkpoints were published there, and not one is whole: to begin anew must be a person's
            decision. Or the directory cannot be read.
    """
    passed_over: dict[Published, DamagedCheckpoint] = {}
    while True:
        names = [name for name in _published(Path(directory)) if step is None or name.step == step]
        found, vanished = _first_whole(Path(directory), names, verify, passed_over)
        if found is not None or not vanished:
            break  # else all that were listed have been deleted as superfluous, and newer ones are there
    if found is not None:
        _warn_of(passed_over.values(), f"Using {found.name} instead.")
    elif passed_over:
        raise CheckpointError(
            f"No checkpoint in {directory} is whole: {'; '.join(d.sentence for d in passed_over.values())}.",
            "Restore one, or give another directory to begin anew.",
        )
    return found


def _first_whole(
    directory: Path, names: Iterable[Published], verify: bool, passed_over: dict[Published, DamagedCheckpoint]
) -> tuple[Checkpoint | None, bool]:
    """The first good one of ``names``, and whether any was deleted while we looked; notes the damaged ones."""
    vanished = False
    for name in names:
        try:
            return open_checkpoint(directory / str(name), verify=verify), vanished
        except DamagedCheckpoint as damage:
            passed_over[name] = damage
        except FileNotFoundError:
            vanished = True
    return None, vanished


def _warn_of(passed_over: Iterable[DamagedCheckpoint], instead: str) -> None:
    for damage in passed_over:
        warnings.warn(f"{damage.sentence}. {instead}", DamagedCheckpointWarning, stacklevel=3)


def _published(directory: Path) -> list[Published]:
    try:
        return published_in(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}.") from None
