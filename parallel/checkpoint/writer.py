"""Writing one checkpoint: every rank its file, then the first rank the manifest and the name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dlaunch
from dlaunch import clock

from .atomic_file import ChecksummedFile, sync_directory, write_durably, write_whole
from .error import CheckpointError, DamagedCheckpoint
from .manifest import (
    DELETING_SUFFIX,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    STATE_NAME,
    FileEntry,
    Manifest,
    Published,
    partial_name,
    published_in,
    shard_name,
)
from .reader import open_checkpoint
from .retention import Retention

PublishGuard = Callable[[], bool]
_HURRIED_S = 5.0  # how long shards are still waited for once training has failed
_POLL_S = 0.02  # how often the first rank looks for the others' shards; works on every shared file system
_in_flight: set[Path] = set()  # what this process is writing, through any saver
_naming = threading.Lock()  # two savers of a process take different numbers


@dataclass(frozen=True, slots=True)
class Save:
    """One rank's part of one checkpoint, all of it in host memory."""

    directory: Path
    step: int
    token: str  # the same on all ranks, and of this save only
    rank: int
    world_size: int
    state: Mapping[str, Any] | None  # what all ranks share; None where another rank writes it
    sharded: Mapping[str, Any] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def partial(self) -> Path:
        """The directory that it is written in."""
        return self.directory / partial_name(self.step, self.token)


def carry_out(
    save: Save, retention: Retention, guard: PublishGuard | None, shard_timeout_s: float, hurry: threading.Event
) -> Path | None:
    """Write this rank's files; on the first rank also publish the checkpoint, and delete superfluous ones.

    Once ``hurry`` is set, the shards of other ranks are given a few seconds more at most: these may be dead.

    Returns:
        The published directory; None on the other ranks.

    Raises:
        CheckpointError: it was not written or not published; what was there before is untouched.
    """
    _in_flight.add(save.partial)
    try:
        save.partial.mkdir(parents=True, exist_ok=True)
        if save.rank != 0:
            _write_noted_shard(save)
            return None
        published = _publish(save, _write_all(save, shard_timeout_s, hurry), guard)
    except OSError as error:
        _give_up(save)
        raise _not_written(save, error) from error
    except CheckpointError:
        _give_up(save)
        raise
    finally:
        _in_flight.discard(save.partial)
    with contextlib.suppress(OSError):  # it is published: what could not be deleted is for the next save
        prune(save.directory, retention)
    return published


def prune(directory: Path, retention: Retention) -> None:
    """Delete superfluous checkpoints; one that cannot be deleted stays. Raises OSError if none can be listed."""
    if retention.keep_last is None:
        return
    whole, damaged = [], []
    for name in published_in(directory):
        try:
            open_checkpoint(directory / str(name), verify=False)
            whole.append(name)
        except (DamagedCheckpoint, FileNotFoundError):
            damaged.append(name)
    for name in retention.superfluous(whole, damaged):
        _delete(directory / str(name))


def remove_leftovers(directory: Path) -> None:
    """Delete what saves and deletions of dead processes left behind. The first rank calls it before its first save."""
    with contextlib.suppress(OSError):  # if the directory is of no use, the save itself will say so
        for leftover in set(directory.iterdir()) - _in_flight:
            if leftover.name.startswith(".") and leftover.suffix in (PARTIAL_SUFFIX, DELETING_SUFFIX):
                shutil.rmtree(leftover, ignore_errors=True)


def _write_all(save: Save, shard_timeout_s: float, hurry: threading.Event) -> Manifest:
    files = []
    if save.sharded is not None:
        files.append(_write_tree(save.partial / shard_name(0, save.world_size), save.sharded))
    if save.state is not None:
        files.append(_write_tree(save.partial / STATE_NAME, save.state))
    if save.sharded is not None:
        files += _await_shards(save, shard_timeout_s, hurry)
    versions = {"dlaunch": dlaunch.__version__, "torch": str(torch.__version__)}
    return Manifest(save.step, save.world_size, tuple(files), save.metadata, versions)


def _write_tree(path: Path, tree: Mapping[str, Any]) -> FileEntry:
    def write(file: ChecksummedFile) -> None:
        torch.save(tree, file)  # type: ignore[arg-type]  # it needs write() and flush() only

    written = write_durably(path, write)
    return FileEntry(path.name, written.size, written.crc32)


def _publish(save: Save, manifest: Manifest, guard: PublishGuard | None) -> Path:
    write_durably(save.partial / MANIFEST_NAME, lambda file: file.write(manifest.encode()))
    sync_directory(save.partial)
    if guard is not None and not guard():
        raise CheckpointError(
            f"The checkpoint of step {save.step} was not published: this process may no longer speak for the job."
        )
    with _naming:
        taken = published_in(save.directory)
        published = save.directory / str(Published(taken[0].sequence + 1 if taken else 1, save.step))
        save.partial.rename(published)  # never onto another one: a directory with files in it is refused
    sync_directory(save.directory)
    return published


def _note(save: Save, rank: int) -> Path:
    """Where a rank tells the first one that its shard is on the disk, or that it failed."""
    return save.partial / f"{shard_name(rank, save.world_size)}.json"


def _write_noted_shard(save: Save) -> None:
    if save.sharded is None:
        return
    try:
        entry = _write_tree(save.partial / shard_name(save.rank, save.world_size), save.sharded)
        note: dict[str, Any] = {"size": entry.size, "crc32": entry.crc32}
    except OSError as error:
        with contextlib.suppress(OSError):
            _write_note(save, {"error": str(error)})
        raise
    _write_note(save, note)


def _write_note(save: Save, note: Mapping[str, Any]) -> None:
    """The last thing that a rank does: from now on the first one may publish, which syncs and moves the directory."""
    write_whole(_note(save, save.rank), json.dumps(note).encode())


def _await_shards(save: Save, timeout_s: float, hurry: threading.Event) -> list[FileEntry]:
    missing = set(range(1, save.world_size))
    began = clock.now()
    deadline = began + timeout_s
    files = []
    while missing:
        for rank in sorted(missing):
            if (entry := _read_note(save, rank)) is not None:
                files.append(entry)
                missing.remove(rank)
        if hurry.is_set():
            deadline = min(deadline, clock.now() + _HURRIED_S)
            hurry = threading.Event()  # once
        if missing and clock.now() > deadline:
            raise CheckpointError(
                f"The checkpoint of step {save.step} was not published: no shard of rank "
                f"{', '.join(map(str, sorted(missing)))} within {round(deadline - began, 1):g} s.",
                f"All ranks must call save() for a sharded state, and see {save.directory} as the same directory.",
            )
        if missing:
            time.sleep(_POLL_S)
    return sorted(files, key=lambda entry: entry.name)


def _read_note(save: Save, rank: int) -> FileEntry | None:
    path = _note(save, rank)
    try:
        note = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if "error" in note:
        raise CheckpointError(
            f"The checkpoint of step {save.step} was not published: rank {rank} could not write its shard "
            f"({note['error']})."
        )
    path.unlink()
    return FileEntry(shard_name(rank, save.world_size), note["size"], note["crc32"])


def _delete(checkpoint: Path) -> None:
    doomed = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}{DELETING_SUFFIX}")
    with contextlib.suppress(OSError):
        checkpoint.rename(doomed)  # so that nobody takes a half-deleted one for a damaged one
        shutil.rmtree(doomed, ignore_errors=True)


def _give_up(save: Save) -> None:
    if save.rank == 0:
        shutil.rmtree(save.partial, ignore_errors=True)


def _not_written(save: Save, error: OSError) -> CheckpointError:
    kept = _published_if_readable(save.directory)
    last = f"The last one published is {kept[0]}." if kept else "None was published in this directory before."
    where = f" ({error.filename})" if error.filename else f" ({save.directory})"
    return CheckpointError(f"The checkpoint of step {save.step} was not written: {error.strerror}{where}.", last)


def _published_if_readable(directory: Path) -> list[Published]:
    try:
        return published_in(directory)
    except OSError:
        return []
