"""The warm start: an interpreter parked before its script, that forks the workers."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import traceback  # noqa: F401  -- so that no worker has to, to describe its end (capture.py)
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from dlaunch import frames

from . import store
from .birth import NotStarted, Request, fork, give_up
from .capture import Capture
from .child import Heritage, become_worker
from .descriptors import close_all_but, open_descriptors
from .hooked import ENTRY, ENTRY_PRELOAD, PRELOAD, TORCH
from .lineage import adopt_orphans, die_with_parent
from .preload import DEFAULTS, Refused, preload
from .signals import SignalInbox
from .starter import Starter


class WarmBirth:
    """Forks workers that return from the hook, so that CPython goes on to run the script."""

    def __init__(self, inbox: SignalInbox) -> None:
        self._inbox = inbox

    def worker(self, request: Request, meanwhile: Callable[[], None]) -> int:
        """Fork; the child is made a worker on its way out of the loop (child.py)."""
        return fork(self._inbox)

    def store(self, request: Request) -> int:
        """Fork the process that serves the workers' store."""
        if not store.can_serve():
            raise NotStarted("this torch cannot serve a store on a socket that is open already.")
        pid = fork(self._inbox)
        if pid == 0:
            _become_store(request)
        return pid


def serve(agent_fd: int, private: Mapping[str, str], capture: Capture, modules_before: AbstractSet[str]) -> None:
    """Preload, and fork workers until the agent goes. Returns in the workers only."""
    began = time.monotonic()
    agent = socket.socket(fileno=agent_fd)
    agent.set_inheritable(False)
    inbox = SignalInbox()
    inbox.deafen()
    descriptors_before = open_descriptors()
    loaded = _preload(agent, private)
    heritage = Heritage(
        modules_before=modules_before,
        descriptors=open_descriptors() - descriptors_before,
        environment=dict(os.environ),
        entry=private.get(ENTRY, ""),
    )
    gc.collect()
    gc.freeze()  # else the first collections write to every page, and each worker gets a copy of all of torch
    inbox.listen()
    adopt_orphans()
    die_with_parent(signal.SIGTERM, os.getppid())
    ready = {"preloaded": loaded, "serves_store": store.can_serve(), "seconds": round(time.monotonic() - began, 3)}
    frames.tell(agent, {"kind": "ready", "pid": os.getpid(), **ready})
    request = Starter(agent, inbox, WarmBirth(inbox)).serve()
    agent.detach()
    become_worker(request, heritage, capture)


def _preload(agent: socket.socket, private: Mapping[str, str]) -> list[str]:
    asked, for_entry = ([name for name in private.get(key, "").split(",") if name] for key in (PRELOAD, ENTRY_PRELOAD))
    try:
        return preload(asked, [*(DEFAULTS if TORCH in private else ()), *for_entry])
    except Refused as why:
        frames.tell(agent, {"kind": "refused", "reason": str(why), "module": why.module, "asked": why.asked})
        os._exit(0)


def _become_store(request: Request) -> None:
    try:
        frame = request.frame
        (listener,) = request.fds
        close_all_but({0, 1, 2, listener})
        store.serve(frame["address"], frame["port"], frame["world_size"], listener)
    except BaseException as error:
        give_up(error)
