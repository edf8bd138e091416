"""The store at which the workers of a round meet: torch's TCPStore, served on a socket that the agent has opened."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn


def can_serve() -> bool:
    """Whether this process has a torch whose TCPStore takes over a listening socket."""
    kind = _store_type()
    return kind is not None and "master_listen_fd" in (kind.__init__.__doc__ or "")


def serve(address: str, port: int, world_size: int, listener: int) -> NoReturn:
    """Serve until killed. Workers that connected earlier wait in the socket's backlog."""
    kind = _store_type()
    _server = kind(  # serves from threads of its own, for as long as the object lives
        address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())  # it serves: what it says now is of clients' names that do not resolve
    os.close(nowhere)
    while True:
        signal.pause()


def _store_type() -> Any:
    return getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
