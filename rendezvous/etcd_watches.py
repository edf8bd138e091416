"""All watches of a client, on one stream to one endpoint; when it breaks, they go on elsewhere where they were."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from . import etcd_messages as messages
from .etcd_member import EOF, Member, Metadata, RpcError, fault_of_error
from .store import Changes, WatchLost

PAUSE_S = (0.05, 1.0)  # between two streams, growing while they bring nothing
HELLO_S = 1.0  # how long a stream may take to confirm a watch before its endpoint is asked whether it lives


class Access(Protocol):
    """What the watches need of the client."""

    def next_member(self) -> Member:
        """The endpoint to use now."""

    async def metadata(self, member: Member, deadline: float) -> Metadata | None:
        """What goes with a call, with a token where there are users; None: there is no token now."""

    def drop_token(self) -> bool:
        """Forget the token, so that a new one is got; returns False where there are no users."""


class EtcdWatch:
    """One watch, on the loop of the client."""

    def __init__(self, key: str, prefix: bool, from_revision: int, tell: Callable[[Changes | WatchLost], None]) -> None:
        self.key = key
        self.prefix = prefix
        self.next_revision = max(from_revision, 1)  # 0 would mean "from now on" to etcd, anew with every stream
        self.tell = tell
        self.over = False
        self.refused = False  # by the last stream

    def hear(self, events: Any) -> None:
        """Tell of events, of each once, in order."""
        changes = tuple(messages.change_of(event) for event in events if event.kv.mod_revision >= self.next_revision)
        if changes and not self.over:
            revision = changes[-1].mod_revision
            self.next_revision = revision + 1
            self.tell(Changes(revision, changes))

    def lose(self, sentence: str) -> None:
        """Tell that it is over."""
        if not self.over:
            self.over = True
            self.tell(WatchLost(sentence))


class Watches:
    """Keeps a stream while there are watches."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._loop = asyncio.get_running_loop()
        self._watches: dict[EtcdWatch, None] = {}  # in the order they came
        self._stream: _Stream | None = None
        self._runner: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        """An endpoint has just served us: a stream that waits for its next try may try now."""
        self._hurried.set()

    def add(self, watch: EtcdWatch) -> None:
        """Begin a watch."""
        self._watches[watch] = None
        if self._stream is not None:
            self._stream.begin(watch)
        if self._runner is None:
            self._runner = self._loop.create_task(self._run())

    def remove(self, watch: EtcdWatch) -> None:
        """End a watch."""
        watch.over = True
        if watch in self._watches:
            del self._watches[watch]
            if self._stream is not None:
                self._stream.end(watch)

    async def close(self) -> None:
        """End all watches and the stream."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})

    async def _run(self) -> None:
        try:
            await self._keep_a_stream()
        except Exception as bug:
            for watch in self._watches:
                watch.lose(f"A bug of dlaunch's etcd client: {bug!r}.")
            raise

    async def _keep_a_stream(self) -> None:
        pause_s = PAUSE_S[0]
        while True:
            member = self._access.next_member()
            brought = await self._one_stream(member)
            pause_s = PAUSE_S[0] if brought else min(pause_s * 2, PAUSE_S[1])
            self._hurried.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), pause_s)

    async def _one_stream(self, member: Member) -> bool:
        """Hold one stream until it breaks or its endpoint is deserted; returns whether it brought anything."""
        deadline = self._loop.time() + HELLO_S * 3
        if await member.connected(deadline) is not None:
            member.is_bad()
            return False
        metadata = await self._access.metadata(member, deadline)
        if metadata is None:
            return False
        self._stream = stream = _Stream(member, metadata, self._access, self._forget)
        for watch in self._watches:
            stream.begin(watch)
        try:
            await stream.hold()
        finally:
            self._stream = None
        return stream.brought

    def _forget(self, watch: EtcdWatch) -> None:
        self._watches.pop(watch, None)


class _Stream:
    """One stream of watches to one endpoint."""

    def __init__(self, member: Member, metadata: Metadata, access: Access, forget: Callable[[EtcdWatch], None]) -> None:
        self.brought = False
        self._member = member
        self._access = access
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._call = member.stream(messages.WATCH, metadata)
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._unconfirmed: deque[EtcdWatch] = deque()  # etcd confirms in the order of the requests
        self._running: dict[int, EtcdWatch] = {}
        self._ids: dict[EtcdWatch, int] = {}
        self._asked = asyncio.Event()  # there is something unconfirmed

    def begin(self, watch: EtcdWatch) -> None:
        """Ask for a watch, from the first revision that it has not heard of."""
        self._unconfirmed.append(watch)
        self._asked.set()
        self._outbox.put_nowait(messages.watch_request(watch.key, watch.prefix, watch.next_revision))

    def end(self, watch: EtcdWatch) -> None:
        """Ask for the end of a watch; of an unconfirmed one, once it is confirmed."""
        watch_id = self._ids.pop(watch, None)
        if watch_id is not None:
            self._running.pop(watch_id, None)
            self._outbox.put_nowait(messages.unwatch_request(watch_id))

    async def hold(self) -> None:
        """Returns when the stream is of no use any more."""
        tasks = [
            self._loop.create_task(work)
            for work in (self._write(), self._read(), self._distrust(), self._member.deserted.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (RpcError, asyncio.InvalidStateError):
            return  # the reader hears why

    async def _distrust(self) -> None:
        """Desert an endpoint that confirms nothing and answers nothing: stopped, or out of reach without a word."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(HELLO_S)
            if not self._unconfirmed:
                self._asked.clear()
            elif self._member.heard_at < self._loop.time() - HELLO_S and not await self._member.is_alive():
                self._member.is_bad()
                return

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not EOF:
                self._member.heard_at = self._loop.time()
                if not self.brought:
                    self.brought = True
                    self._member.is_good()
                if not self._take(reply):
                    return
        except RpcError as error:
            if not (fault_of_error(error).is_of_token and self._access.drop_token()):
                self._member.is_bad()

    def _take(self, reply: Any) -> bool:
        """One message of etcd; returns whether the stream is still of use."""
        if reply.created:
            watch = self._unconfirmed.popleft()
            return self._refused(watch, reply) if reply.canceled else self._confirmed(watch, reply.watch_id)
        watch_or_none = self._running.get(reply.watch_id)
        if watch_or_none is None:
            return True
        if reply.canceled:
            self._lost(watch_or_none, reply)
            return True
        watch_or_none.hear(reply.events)
        return True

    def _confirmed(self, watch: EtcdWatch, watch_id: int) -> bool:
        watch.refused = False
        self._running[watch_id] = watch
        self._ids[watch] = watch_id
        if watch.over:
            self.end(watch)
        return True

    def _refused(self, watch: EtcdWatch, reply: Any) -> bool:
        """etcd 3.4 and 3.5 refuse a watch in the same words where the token is old and where permission lacks."""
        if not watch.refused and self._access.drop_token():
            watch.refused = True
            return False
        self._lost(watch, reply)
        return True

    def _lost(self, watch: EtcdWatch, reply: Any) -> None:
        self._running.pop(self._ids.pop(watch, -1), None)
        self._forget(watch)
        if reply.compact_revision:
            watch.lose(f"The changes from revision {watch.next_revision} on are gone: etcd was compacted.")
        else:
            watch.lose(f"etcd has ended the watch of {watch.key!r}: {reply.cancel_reason or 'it gave no reason'}.")
