"""The store on etcd v3, as its owner's thread sees it; a thread that all stores of a process share does the work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from functools import partial

from dlaunch.errors import ConfigurationError

from . import etcd_messages as messages
from .endpoints import EtcdSettings, parse_endpoint, read_certificates
from .etcd_client import Asked, Client, may_repeat
from .etcd_member import tls_context
from .etcd_watches import EtcdWatch, Watches
from .limits import refusal
from .store import Answer, Answered, Changes, Heard, Request, StoreError, WatchLost

__all__ = ["EtcdSettings", "EtcdStore"]

CLOSE_S = 1.0

Deliver = Callable[[Callable[[], None]], None]


class EtcdStore:
    """A `Store` on etcd. ``deliver`` is called on any thread, and posts a function to that of the store's owner.

    Raises UsageError and ConfigurationError for settings that cannot be; connects to nothing before it is asked to.
    """

    def __init__(self, settings: EtcdSettings, deliver: Deliver) -> None:
        if not settings.endpoints:
            raise ConfigurationError("No endpoint of etcd is given.")
        for text in settings.endpoints:
            parse_endpoint(text)
        certificates = read_certificates(settings)
        try:
            tls = tls_context(settings)
        except OSError as error:
            raise ConfigurationError(
                f"The files for etcd's TLS are no certificates and keys in PEM: {error}."
            ) from None
        self._deliver = deliver
        self._closed = False
        self._loop = _shared_loop()
        self._client: Client | None = None
        self._loop.call_soon_threadsafe(self._start, partial(Client, settings, certificates, tls))

    def _start(self, make: Callable[[], Client]) -> None:
        self._client = make()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, for people; empty before the first request."""
        return self._client.endpoint if self._client is not None else ""

    def request(self, request: Request, timeout_s: float, answered: Answered) -> None:
        """Perform ``request``; see `Store.request`."""
        if (refused := refusal(request)) is not None:
            self._answer(answered, refused)
            return
        method, message = messages.encode(request)
        deadline = self._loop.time() + timeout_s
        asked = Asked(request, method, message, timeout_s, deadline, may_repeat(request))
        self._loop.call_soon_threadsafe(self._begin, asked, partial(self._answer, answered))

    def _begin(self, asked: Asked, done: Callable[[Answer | StoreError], None]) -> None:
        assert self._client is not None
        self._client.begin(asked, done)

    def _answer(self, answered: Answered, answer: Answer | StoreError) -> None:
        self._deliver(lambda: None if self._closed else answered(answer))

    def watch(self, key: str, *, prefix: bool, from_revision: int, heard: Heard) -> _Handle:
        """Hear of changes; see `Store.watch`."""
        return _Handle(self, key, prefix, from_revision, heard)

    def close(self) -> None:
        """Call back no more, and let go of all connections; takes some milliseconds."""
        if not self._closed:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
                ending.result(CLOSE_S)

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()

    def post(self, call: Callable[[], None]) -> None:
        """Have a function called by the owner."""
        self._deliver(lambda: None if self._closed else call())

    def on_watches(self, act: Callable[[Watches], None]) -> None:
        """Do something with the watches, on their loop."""

        def do() -> None:
            assert self._client is not None
            act(self._client.watches)

        self._loop.call_soon_threadsafe(do)


class _Handle:
    """What the owner of a store holds of a watch."""

    def __init__(self, store: EtcdStore, key: str, prefix: bool, from_revision: int, heard: Heard) -> None:
        self._store = store
        self._heard = heard
        self._cancelled = False
        self._watch = EtcdWatch(key, prefix, from_revision, self._tell)
        store.on_watches(lambda watches: watches.add(self._watch))

    def _tell(self, news: Changes | WatchLost) -> None:
        self._store.post(lambda: None if self._cancelled else self._heard(news))

    def cancel(self) -> None:
        """Hear nothing more."""
        self._cancelled = True
        self._store.on_watches(lambda watches: watches.remove(self._watch))


# --- the thread ------------------------------------------------------------------------------------------------------

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """The loop of all stores of this process, on a thread of its own: gRPC's asyncio part wants one loop a process."""
    global _loop  # noqa: PLW0603
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="dlaunch-etcd", daemon=True).start()
        return _loop
