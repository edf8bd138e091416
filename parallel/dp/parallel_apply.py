"""Running several modules at once, one thread for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

_SHOWS_NOTES = hasattr(BaseException, "add_note")  # Python 3.11


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[torch.device] | None = None,
) -> list[Any]:
    """The output of each module for its own input, computed at the same time.

    Each thread runs under its caller's grad mode, inference mode, autocast and context variables, on its device and
    on the stream that is current there. Random numbers on a CPU are drawn from the process's one generator, so with
    dropout the replicas' draws interleave and are not reproducible.

    Args:
        modules: what to run.
        inputs: for each module its positional arguments (a tuple or list), or the only one.
        kwargs_tup: for each module its keyword arguments.
        devices: for each module the device that is made current; the CPU if ``None``.

    Raises:
        ValueError: the sequences differ in length.
        Exception: what the first of the failing replicas raised, the same object with the replica's index added to
            its message (or, where its arguments are not just a message, to its notes, or as its cause).
    """
    kwargs_tup = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    devices = [torch.device("cpu")] * len(modules) if devices is None else devices
    if not len(modules) == len(inputs) == len(kwargs_tup) == len(devices):
        raise ValueError(
            f"{len(modules)} modules, {len(inputs)} inputs, {len(kwargs_tup)} kwargs, {len(devices)} devices"
        )
    state = _CallerState.of_this_thread(devices)
    calls = [
        partial(_apply, state, *call) for call in zip(range(len(modules)), modules, inputs, kwargs_tup, strict=True)
    ]
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="replica") as pool:
        futures = [pool.submit(copy_context().run, call) for call in calls]
    return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class _CallerState:
    """What torch keeps for each thread, and the replicas' threads must share with their caller."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device type, dtype, cache: where it is enabled
    places: tuple[tuple[torch.device, Any], ...]  # for each replica its device, and that device's current stream

    @classmethod
    def of_this_thread(cls, devices: Sequence[torch.device]) -> _CallerState:
        types = sorted({"cpu", *(device.type for device in devices)})
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (type_, torch.get_autocast_dtype(type_), torch.is_autocast_cache_enabled())
                for type_ in types
                if torch.is_autocast_enabled(type_)
            ),
            tuple((device, _current_stream(device)) for device in devices),
        )

    @contextmanager
    def entered(self, replica: int) -> Iterator[None]:
        device, stream = self.places[replica]
        with ExitStack() as stack:
            if stream is not None:
                backend = torch.get_device_module(device)
                stack.enter_context(backend.device(device))
                stack.enter_context(backend.stream(stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for type_, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(type_, dtype, cache_enabled=cache))
            yield


def _current_stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def _apply(state: _CallerState, replica: int, module: nn.Module, arguments: Any, kwargs: Mapping[str, Any]) -> Any:
    positional = arguments if isinstance(arguments, (tuple, list)) else (arguments,)
    try:
        with state.entered(replica):
            return module(*positional, **kwargs)
    except BaseException as error:
        name_the_replica(error, f"in replica {replica} on device {state.places[replica][0]}")
        raise


class InReplica(RuntimeError):
    """Where an exception came from: its cause on Python 3.10, whose tracebacks show no notes."""


def name_the_replica(error: BaseException, where: str, *, shows_notes: bool = _SHOWS_NOTES) -> None:
    """Add ``where`` to what a traceback of ``error`` says; once, for a module may raise the same object again."""
    if len(error.args) == 1 and str(error) == error.args[0]:
        if not str(error).endswith(f"({where})"):
            error.args = (f"{error.args[0]} ({where})",)
    elif shows_notes:  # a KeyError's argument is the key, an OSError's are numbers: programs read them
        notes = getattr(error, "__notes__", [])
        error.__notes__ = [*notes, *([] if where in notes else [where])]  # what add_note does
    elif error.__cause__ is None:
        error.__cause__ = InReplica(where)
