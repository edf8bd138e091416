"""A TCP proxy that leads each connection to the next of several servers, in turn."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from types import TracebackType


class Balancer:
    """Listens on loopback until the ``with`` ends."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.connections = 0
        self._servers = [(host, int(port)) for host, _, port in (server.rpartition(":") for server in servers)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]

    def __enter__(self) -> Balancer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._servers[self.connections % len(self._servers)])
                self.connections += 1
                self._sockets += [client, server]
                threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                threading.Thread(target=_pump, args=(server, client), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
