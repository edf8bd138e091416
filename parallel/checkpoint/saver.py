"""Saving while training goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..agreement import from_first_rank, largest, rank_and_size
from ..collective_error import told
from .claim import claim, release
from .error import CheckpointError
from .manifest import Manifest
from .retention import Retention
from .state import State, snapshot
from .writer import PublishGuard, Save, carry_out, remove_leftovers

_log = logging.getLogger("dlaunch.checkpoint")


class Saver:
    """Saves the checkpoints of a job, one at a time, in the background.

    ``save`` copies the state to host memory and returns; a thread writes it. The next ``save``, ``wait`` or ``close``
    waits for that thread, and raises what went wrong in it. A normal end of the process waits for it as well.

    State that all ranks share is written by the first rank; the others return at once. With ``sharded`` every rank
    writes its own file, and the first publishes the checkpoint when all are on the disk; the directory must then be
    the same for all ranks.

    Args:
        directory: made if need be. One job at a time may save into it: a second one is refused until this saver is
            closed, or its process has ended.
        keep_last: how many of the last checkpoints stay; ``None`` for all.
        keep_every: besides, those whose step is a multiple of it.
        background: ``False`` to return from ``save`` only when the checkpoint is published, on every rank.
        process_group: the ranks of the job; the default group if ``None``.
        publish_guard: asked on the first rank right before a checkpoint gets its name; if it answers ``False``, the
            checkpoint is given up. For a process that may have been replaced without knowing it.
        shard_timeout_s: how long the first rank waits for the shards of the others.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        background: bool = True,
        process_group: dist.ProcessGroup | None = None,
        publish_guard: PublishGuard | None = None,
        shard_timeout_s: float = 1800.0,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.retention = Retention(keep_last, keep_every)
        self.background = background
        self.published: Path | None = None  # the last checkpoint that this process published
        self._group = process_group
        self._guard = publish_guard
        self._shard_timeout_s = shard_timeout_s
        self._claimed = False
        self._tidied = False
        self._shared_token = ""
        self._sharded_saves = 0
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._error: CheckpointError | None = None

    def save(
        self,
        state: State | None,
        step: int,
        *,
        sharded: State | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint; call it on every rank, after the same step.

        Args:
            state: what all ranks share: a tree of dicts, lists and tuples, with tensors, plain values and objects
                that have ``state_dict`` (model, optimizer, scheduler, scaler, sampler). Only the first rank's is
                used.
            step: how many steps have been trained.
            sharded: what only this rank has: another such tree.
            metadata: small facts in JSON, readable without loading anything.

        Raises:
            CheckpointError: the state holds what cannot be read back, another job saves into the directory, or the
                save before this one failed (then this one was not begun). Without ``background`` also for this one,
                on every rank.
        """
        self.wait()
        try:
            self._begin(state, step, sharded, metadata)
        except CheckpointError as error:
            if self.background:
                raise
            self._error = error  # the other ranks are on their way to hear of it
        if not self.background:
            self._finish_together(step)

    def _begin(self, state: State | None, step: int, sharded: State | None, metadata: Mapping[str, Any] | None) -> None:
        rank, world_size = rank_and_size(self._group)
        refusal = self._enter_directory(in_a_group=world_size > 1) if rank == 0 else None
        token = self._token(shared=sharded is not None)
        if refusal is not None:
            raise refusal
        if rank == 0 or sharded is not None:
            self._start(self._taken(state, sharded, step, metadata, token, rank, world_size))

    def _enter_directory(self, *, in_a_group: bool) -> CheckpointError | None:
        """Claim the directory and clear it of leftovers, once; why that may not be."""
        if not self._claimed:
            if (refusal := claim(self.directory, in_a_group=in_a_group)) is not None:
                return refusal
            self._claimed = True
        if not self._tidied:
            remove_leftovers(self.directory)  # before any rank knows the name of the directory to write in
            self._tidied = True
        return None

    def _token(self, *, shared: bool) -> str:
        """What tells this save from every other one; ``shared``: the same on all ranks, by a collective once."""
        if not shared:
            return secrets.token_hex(8)
        if not self._shared_token:
            with told("Saver.save", self._group):
                number = from_first_rank([secrets.randbits(62)], self._group)[0]
            self._shared_token = f"{number:016x}"
        self._sharded_saves += 1
        return f"{self._shared_token}-{self._sharded_saves}"

    def _taken(
        self,
        state: State | None,
        sharded: State | None,
        step: int,
        metadata: Mapping[str, Any] | None,
        token: str,
        rank: int,
        world_size: int,
    ) -> Save:
        return Save(
            self.directory,
            step,
            token,
            rank,
            world_size,
            snapshot(state, copy=self.background) if state is not None and rank == 0 else None,
            snapshot(sharded, copy=self.background) if sharded is not None else None,
            _checked(metadata),
        )

    def _start(self, save: Save) -> None:
        if not self.background:
            self._write(save)
            return
        # Not a daemon: a normal end of the process waits for it.
        self._thread = threading.Thread(target=self._write, args=(save,), name="dlaunch checkpoint writer")
        self._thread.start()

    def _write(self, save: Save) -> None:
        try:
            published = carry_out(save, self.retention, self._guard, self._shard_timeout_s, self._hurry)
            self.published = published or self.published
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # the thread must not die silently
            self._error = CheckpointError(f"The checkpoint of step {save.step} was not written: {error!r}.")
            self._error.__cause__ = error
        if self._error is not None and self.background:
            _log.error("%s", self._error)  # now, since the next call may be far away

    def _finish_together(self, step: int) -> None:
        with told("Saver.save", self._group):
            failed_somewhere = largest([self._error is not None], self._group)[0]
        self.wait()
        if failed_somewhere:
            raise CheckpointError(f"The checkpoint of step {step} was not written: another rank failed.")

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when nothing is being written; raises CheckpointError if the last save failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """``wait``, and let other jobs save into the directory; the end of a ``with`` statement calls it.

        A ``with`` statement that is left by an exception lets that one pass, whatever became of the save in flight, and
        gives the other ranks' shards a few seconds only.
        """
        try:
            self.wait()
        finally:
            if self._claimed:
                self._claimed = False
                release(self.directory)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._hurry.set()
        with contextlib.suppress(CheckpointError):  # it was logged; what the user must see is ``error``
            self.close()


def _checked(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    try:
        Manifest(0, 1, (), metadata or {}).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The metadata of a checkpoint must be JSON: {error}.") from None
    return dict(metadata or {})
