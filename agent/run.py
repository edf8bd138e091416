"""Runs a job on this node, from its specification to its outcome."""

from __future__ import annotations

import os

from dlaunch.errors import ConfigurationError
from dlaunch.outcome import Outcome
from dlaunch.spec import JobSpec

from .console import Console
from .family import become_subreaper
from .layout import RunDirectory
from .loop import Loop
from .machine import Machine, Settings
from .record import RunRecord
from .signals import SignalSource
from .starter import Starter
from .writer import FileWriter


def run_node(
    spec: JobSpec, local_world_size: int, console: Console, first_starter: Starter, signals: SignalSource
) -> Outcome:
    """Run ``local_world_size`` workers until they succeed, fail for good, or a signal ends the job.

    ``first_starter`` was started for ``spec`` beforehand, to be on its way while this module was imported; it is used
    up. ``signals`` listens. Raises ConfigurationError where the job cannot be started as it is specified.
    Whether this returns or raises, no process of the run lives afterwards.
    """
    become_subreaper()
    try:
        _check_visible_devices(spec, local_world_size)
        directory = RunDirectory.create(spec)
    except BaseException:
        first_starter.dismiss()
        raise
    try:
        return _run(spec, local_world_size, console, first_starter, directory, signals)
    finally:
        directory.close()


def _run(
    spec: JobSpec,
    local_world_size: int,
    console: Console,
    first_starter: Starter,
    directory: RunDirectory,
    signals: SignalSource,
) -> Outcome:
    node = os.uname().nodename
    settings = Settings(
        local_world_size=local_world_size,
        run_id=spec.run_id,
        node=node,
        start_method=spec.start_method,
        restart=spec.restart,
        grace_s=spec.grace_s,
        ending_signals=tuple(int(signum) for signum in spec.signals),
        run_dir=str(directory.path) if directory.path else None,
    )
    writer = FileWriter()
    record = RunRecord(directory.record, spec, local_world_size, node, writer)
    if spec.rendezvous is None:
        loop = Loop(spec, local_world_size, console, Machine(settings), directory, record, first_starter, writer)
        outcome = loop.run(signals)
    else:
        from .node import run_member  # noqa: PLC0415  -- a run on one node does without all that

        outcome = run_member(spec, settings, console, directory, record, first_starter, writer, signals)
    record.finished(outcome)
    return outcome


def _check_visible_devices(spec: JobSpec, local_world_size: int) -> None:
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if spec.virtual_local_rank and visible and len(visible) < local_world_size:
        raise ConfigurationError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES names {len(visible)} devices for {local_world_size} workers.",
            "Name one device for each worker.",
        )
