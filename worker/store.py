"""The store at which the workers of a round meet: torch's TCPStore, served on a socket that the agent has opened."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def can_serve() -> bool:
    """Whether this process has a torch whose TCPStore takes over a listening socket."""
    store = getattr(sys.modules.get("torch.distributed"), "TCPStore", None)
    return store is not None and "master_listen_fd" in (store.__init__.__doc__ or "")


def serve(address: str, port: int, world_size: int, listener: int) -> NoReturn:
    """Serve until killed. The workers that came before us wait in the socket's backlog."""
    import torch.distributed  # noqa: PLC0415  -- is there, or `can_serve` has said no

    _server = torch.distributed.TCPStore(  # serves from a thread of its own for as long as the object lives
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    while True:
        signal.pause()
