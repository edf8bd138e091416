"""TCP servers that are no etcd, to be met at an endpoint."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

Speak = Callable[[socket.socket], None]


class Stranger:
    """A TCP server that says something of its own to whoever connects."""

    def __init__(self, speak: Speak, family: socket.AddressFamily = socket.AF_INET) -> None:
        host = "::1" if family is socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self.endpoint = f"[::1]:{port}" if family is socket.AF_INET6 else f"127.0.0.1:{port}"
        self._speak = speak
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            self._speak(connection)
        except OSError:
            connection.close()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()


def web_server(connection: socket.socket) -> None:
    """As an etcd 2 does, which knows no HTTP/2."""
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.close()


def ssh_server(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    connection.recv(1024)


def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 4)
    connection.recv(1024)


def silence(connection: socket.socket) -> None:
    while connection.recv(1024):
        pass


def hanging_up(connection: socket.socket) -> None:
    connection.recv(1)
    connection.close()
