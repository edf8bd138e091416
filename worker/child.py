"""From a fork of the starter to a process that cannot tell that it was not started as ``python -u script.py``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from . import entry, renewal
from .birth import Request, give_up
from .capture import Capture
from .descriptors import close_all_but, out_of_the_way
from .shadows import forget_shadowed, script_folder


class Heritage(NamedTuple):
    """What a worker needs to know of the starter that it was forked from."""

    modules_before: AbstractSet[str]  # in sys.modules before our hook
    descriptors: AbstractSet[int]  # opened by preloaded modules, and theirs to keep
    environment: Mapping[str, str]  # that the preloaded modules have seen
    entry: str  # what to call before the script; empty for nothing


def become_worker(request: Request, heritage: Heritage, capture: Capture) -> None:
    """Make this freshly forked process the worker that was asked for; on return CPython runs the script."""
    try:
        channel = _take_descriptors(request.fds, heritage.descriptors)
        os.environ.update(request.frame["environment"])
        if (arguments := request.frame["arguments"]) is not None:
            take_arguments(arguments)
        renewal.renew(_changed(heritage.environment))
        forget_shadowed(script_folder(), heritage.modules_before)
        importlib.invalidate_caches()  # a file that is new since the starter looked is found
        capture.begin(channel, note_late_variables=True)
        if heritage.entry:
            entry.call(heritage.entry)
    except BaseException as error:
        give_up(error)


def take_arguments(arguments: Sequence[str]) -> None:
    """Give the script other arguments than the starter was started with."""
    count = len(sys.argv) - 1
    sys.orig_argv[len(sys.orig_argv) - count :] = arguments
    sys.argv[1:] = arguments


def _take_descriptors(fds: Sequence[int], opened_by_preload: AbstractSet[int]) -> int:
    out, err, channel = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    channel = out_of_the_way(channel)
    close_all_but({0, 1, 2, channel, *opened_by_preload})
    return channel


def _changed(seen: Mapping[str, str]) -> set[str]:
    return {name for name, value in os.environ.items() if seen.get(name) != value}
