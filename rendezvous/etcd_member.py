"""One endpoint of etcd: its gRPC channel, whether it is connected, and whether it has been heard of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator
from typing import Any

from . import etcd_messages as messages
from .endpoints import Certificates, Endpoint, EtcdSettings
from .etcd_faults import Fault, Help, fault_of
from .etcd_messages import Method
from .etcd_probe import look_at
from .store import Trouble


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """gRPC's core writes to our stderr what it meets, in words for its authors; it reads this when it starts.

    The variable is there for that moment only, so no child process inherits it. Who has set it wants to see.
    """
    set_by_us = "GRPC_VERBOSITY" not in os.environ
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        yield
    finally:
        if set_by_us:
            del os.environ["GRPC_VERBOSITY"]


with _quiet():
    import grpc  # type: ignore[import-untyped]
    import grpc.aio  # type: ignore[import-untyped]

    grpc.insecure_channel("127.0.0.1:1").close()  # starts the core

READY = grpc.ChannelConnectivity.READY
FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
LOOK_AFTER_S = 0.3  # a connection that takes longer is looked at
LOOK_FRESH_S = 1.0

OPTIONS = (
    # A connection whose peer is stopped or gone without a word breaks after 7 s. Faster, etcd hangs up on us:
    # its --grpc-keepalive-min-time is 5 s.
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each store of a process
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # a pod that comes back has a new address
    ("grpc.max_receive_message_length", -1),  # a list of thousands of nodes is more than 4 MB
    ("grpc.max_send_message_length", -1),  # etcd says itself what is too large
    ("grpc.enable_http_proxy", 0),  # etcd is near; a proxy for the Internet is not the way to it
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of our own, not one that another store of this process has
)
CODE_OF = {code: code.name for code in grpc.StatusCode}
EOF = grpc.aio.EOF
RpcError = grpc.aio.AioRpcError
Metadata = tuple[tuple[str, str], ...]


class GivenUp(Exception):
    """A call was on a connection that we have given up."""


def fault_of_error(error: Any) -> Fault:
    """What an error of a call means."""
    if isinstance(error, GivenUp):
        return Fault(Trouble.TIMEOUT, "no answer", maybe_done=True)
    return fault_of(CODE_OF[error.code()], error.details() or "")


def tls_context(settings: EtcdSettings) -> ssl.SSLContext | None:
    """What Python's own TLS needs to look at an endpoint; raises OSError where the files are no certificates."""
    if not settings.uses_tls:
        return None
    context = ssl.create_default_context(cafile=settings.ca or None)
    if settings.cert:
        context.load_cert_chain(settings.cert, settings.key)
    context.set_alpn_protocols(["h2"])
    return context


class Member:
    """A member of etcd as we see it through one endpoint. Lives on the loop of the client."""

    def __init__(
        self, endpoint: Endpoint, tls: ssl.SSLContext | None, certificates: Certificates, try_s: float
    ) -> None:
        self.name = str(endpoint)
        self.heard_at = 0.0  # when anything came from it
        self.troubled_at = 0.0  # when it last failed us; 0: it does not
        self.deserted = asyncio.Event()  # set, and replaced, at its next failure: for those who hold a stream on it
        self._endpoint = endpoint
        self._tls = tls
        self._certificates = certificates
        self._try_s = try_s
        self._loop = asyncio.get_running_loop()
        self._channel = self._open()
        self.connection = 1  # counts our attempts to start anew
        self.cluster_id = 0  # as it told us on this connection; 0: it has not
        self._closing: asyncio.Task[None] | None = None
        self._calls: dict[str, Any] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._follower = self._loop.create_task(self._follow())
        self._doubt: asyncio.Task[None] | None = None
        self._look: asyncio.Task[Fault] | None = None
        self._looked_at = 0.0
        self._seen: Fault | None = None  # by the last look
        self._probe: asyncio.Task[bool] | None = None
        self._is_closed = False

    def _open(self) -> Any:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.name, options=OPTIONS)
        files = self._certificates
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        return grpc.aio.secure_channel(self.name, credentials, options=OPTIONS)

    async def close(self) -> None:
        """Let go of the connection."""
        self._is_closed = True
        for task in (self._follower, self._look, self._probe, self._doubt):
            if task is not None:
                task.cancel()
        await self._channel.close()

    # --- connecting ------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Wake those who wait for the connection whenever its state changes."""
        while True:
            state = self._channel.get_state()
            if state is not READY:
                self.cluster_id = 0  # who answers next may be somebody else
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            await self._channel.wait_for_state_change(state)

    async def connected(self, deadline: float) -> Fault | None:
        """Wait for a connection, for `try_s` at most; None: there is one. Else nothing was sent, for certain."""
        began = self._loop.time()
        until = min(began + self._try_s, deadline)
        while (state := self._channel.get_state(try_to_connect=True)) is not READY:
            now = self._loop.time()
            if state is FAILED or now >= until:
                return await self._why(min(deadline, now + self._try_s))
            if now - began >= LOOK_AFTER_S:
                self._begin_look()
                await self._state_change(until - now)
            else:
                await self._state_change(min(until, began + LOOK_AFTER_S) - now)
        self._seen = None
        return None

    async def _state_change(self, within_s: float) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await asyncio.wait({waiter}, timeout=within_s)

    def _begin_look(self) -> asyncio.Task[Fault]:
        now = self._loop.time()
        if self._look is None or (self._look.done() and now - self._looked_at > LOOK_FRESH_S):
            self._looked_at = now
            self._look = self._loop.create_task(self._look_again())
        return self._look

    async def _look_again(self) -> Fault:
        found = await look_at(self._endpoint, self._tls, self._try_s)
        before, self._seen = self._seen, found
        if found.is_lasting or found.trouble not in {Trouble.DENIED, Trouble.WRONG_SERVER}:
            return found
        if found == before:
            return found._replace(help=Help.ANOTHER_ENDPOINT)
        return found._replace(trouble=Trouble.UNREACHABLE)

    async def _why(self, deadline: float) -> Fault:
        look = self._begin_look()
        await asyncio.wait({look}, timeout=max(deadline - self._loop.time(), 0.0))
        if look.done():
            return look.result()
        return self._seen or Fault(Trouble.UNREACHABLE, "it cannot be connected to in time")

    # --- calling ---------------------------------------------------------------------------------------------------

    async def call(self, method: Method, message: Any, timeout_s: float, metadata: Metadata) -> Any:
        """One call with one answer; raises RpcError and GivenUp."""
        call = self._calls.get(method.path)
        if call is None:
            call = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            self._calls[method.path] = call
        connection = self.connection
        try:
            reply = await call(message, timeout=timeout_s, metadata=metadata)
        except asyncio.CancelledError:
            if connection == self.connection:
                raise
            raise GivenUp from None  # it was not we who were cancelled
        except RpcError as error:
            if error.code() not in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}:
                self.heard_at = self._loop.time()
            raise
        self.heard_at = self._loop.time()
        return reply

    def stream(self, method: Method, metadata: Metadata) -> Any:
        """A stream both ways, without an end."""
        return self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(metadata=metadata)

    async def is_alive(self) -> bool:
        """Whether it answers a question that needs nobody else, within `try_s`."""
        if self._probe is None or self._probe.done():
            self._probe = self._loop.create_task(self._ask())
        return await asyncio.shield(self._probe)

    async def _ask(self) -> bool:
        before = self._loop.time()
        with contextlib.suppress(RpcError, GivenUp):
            await self.call(messages.RANGE, messages.probe(), self._try_s, ())
        return self.heard_at >= before

    def doubt(self) -> None:
        """It was silent: unless it answers now, connect anew.

        Behind a name or a balancer there may be others, and gRPC would hold on to a dead connection for 7 s.
        """
        if not self._is_closed and (self._doubt is None or self._doubt.done()):
            self._doubt = self._loop.create_task(self._reconnect_unless_alive())

    async def _reconnect_unless_alive(self) -> None:
        connection = self.connection
        with contextlib.suppress(grpc.aio.UsageError):  # closed meanwhile: what was asked cannot be sent any more
            if not await self.is_alive() and not self._is_closed:
                self.reconnect(connection)

    def reconnect(self, connection: int) -> None:
        """Give up a connection, by its number: what is under way on it fails."""
        if connection != self.connection:
            return  # somebody has done so already
        old, self._channel = self._channel, self._open()
        self.connection += 1
        self.cluster_id = 0
        self._calls = {}
        self._follower.cancel()
        self._follower = self._loop.create_task(self._follow())
        self._closing = self._loop.create_task(old.close())

    def is_good(self) -> None:
        """It has served us."""
        self.troubled_at = 0.0

    def is_bad(self) -> None:
        """It has failed us."""
        self.troubled_at = self._loop.time()
        self.deserted.set()
        self.deserted = asyncio.Event()
