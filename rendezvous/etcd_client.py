"""What talks to etcd: which endpoint gets a request, when a second one does, and who we are there.

Of requests:

- Reads, renewals and revocations are sent to a second endpoint when the first is silent for `try_s`, and the first
  answer counts.
- A write is sent to a second endpoint only when the first did not get it: there was no connection, or etcd says that it
  refused. After that it waits for its answer as long as the endpoint gives any sign of life.
- An endpoint that failed is left for another, and is used again when that one fails.
- An endpoint of another cluster is not used at all (etcd_identity.py).
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

from . import etcd_messages as messages
from .endpoints import Certificates, EtcdSettings, parse_endpoint
from .etcd_faults import Fault, Help, error_of
from .etcd_identity import Identities
from .etcd_member import GivenUp, Member, Metadata, RpcError, fault_of_error
from .etcd_messages import Method
from .etcd_watches import Watches
from .store import (
    Answer,
    GrantLease,
    LeaseRevoked,
    Range,
    RangeAnswer,
    Request,
    RevokeLease,
    StoreError,
    Trouble,
    Txn,
    TxnAnswer,
)

PAUSE_S = (0.05, 0.2)  # after all endpoints failed, growing
TOKEN_TRIES = 2
_LEADER_WANTED = ("hasleader", "true")  # a member without a leader says so at once, in place of waiting for one


def may_repeat(request: Request) -> bool:
    """Whether a request may be sent twice without harm."""
    match request:
        case Txn():
            return all(isinstance(operation, Range) for operation in (*request.success, *request.failure))
        case GrantLease():
            return False
        case _:
            return True


class Asked(NamedTuple):
    """A request on its way."""

    request: Request
    method: Method
    message: Any
    timeout_s: float
    deadline: float  # on the loop's clock
    repeatable: bool


def _only_reads(txn: Txn) -> bool:
    return not txn.compares and all(isinstance(operation, Range) for operation in txn.success)


def _range_of(asked: Asked, wanted: Range, revision: int = 0) -> Asked:
    """One range of a transaction, at a revision (0: the present one)."""
    method, message = messages.encode(wanted)
    message.revision = revision
    return asked._replace(request=wanted, method=method, message=message)


class Client:
    """All that talks to etcd. Lives on the loop."""

    def __init__(self, settings: EtcdSettings, certificates: Certificates, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        endpoints = [parse_endpoint(text) for text in dict.fromkeys(settings.endpoints)]
        random.shuffle(endpoints)  # a thousand agents are given the same list
        self._members = [Member(endpoint, tls, certificates, settings.try_s) for endpoint in endpoints]
        self._current = self._members[0]
        self._identities = Identities(self._members, settings.try_s)
        self._token: str | None = None if settings.user else ""
        self._asking: dict[Member, asyncio.Lock] = {member: asyncio.Lock() for member in self._members}  # for a token
        self._revision = 0  # that etcd last told us
        self._tasks: set[asyncio.Task[None]] = set()
        self.watches = Watches(self)

    async def close(self) -> None:
        """End everything."""
        self._identities.close()
        for task in self._tasks:
            task.cancel()
        await self.watches.close()
        await asyncio.gather(*(member.close() for member in self._members), return_exceptions=True)

    # --- endpoints -------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._current.name

    def next_member(self, *but: Member) -> Member:
        """The endpoint in use, unless it fails; then the one whose last failure is the oldest."""
        rest = [member for member in self._members if member not in but]
        return min(rest, key=lambda member: (member.troubled_at, member is not self._current))

    def _served(self, member: Member) -> None:
        member.is_good()
        self._current = member
        self.watches.hurry()

    def _silent(self, member: Member, since: float) -> Fault | None:
        """Where nothing at all has come from an endpoint since a time, it is in trouble."""
        if member.heard_at >= since:
            return None
        member.is_bad()
        member.doubt()
        return Fault(Trouble.TIMEOUT, "no answer")

    # --- requests --------------------------------------------------------------------------------------------------

    def begin(self, asked: Asked, done: Callable[[Answer | StoreError], None]) -> None:
        """Perform a request; ``done`` is called once."""
        task = self._loop.create_task(self._perform(asked, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, asked: Asked, done: Callable[[Answer | StoreError], None]) -> None:
        try:
            refused = await self._identities.ask_all(self._members[0])
            if refused is not None:
                answer: Answer | StoreError = refused
            elif isinstance(asked.request, Txn) and asked.request.success and _only_reads(asked.request):
                answer = await self._snapshot(asked, asked.request)
            else:
                answer = await (self._repeat(asked) if asked.repeatable else self._write(asked))
        except Exception as bug:
            done(StoreError(Trouble.OTHER, f"A bug of dlaunch's etcd client: {bug!r}.", not asked.repeatable))
            raise
        done(answer)

    async def _snapshot(self, asked: Asked, txn: Txn) -> Answer | StoreError:
        """A transaction that only reads, as ranges at one revision.

        Sent as a transaction it can kill etcd: before 3.5.5, one whose caller's deadline passes while it is applied
        makes etcd panic ("unexpected error during txn", etcd issue 14110; seen with 3.5.1).
        """
        first, *rest = (operation for operation in txn.success if isinstance(operation, Range))
        answer = await self._repeat(_range_of(asked, first))
        if not isinstance(answer, RangeAnswer):
            return answer
        others = await asyncio.gather(*(self._repeat(_range_of(asked, one, answer.revision)) for one in rest))
        ranges = [answer]
        for other in others:
            if not isinstance(other, RangeAnswer):
                return other
            ranges.append(other)
        return TxnAnswer(answer.revision, True, tuple(ranges))

    async def _repeat(self, asked: Asked) -> Answer | StoreError:
        """Try one endpoint after the other, the next when the last failed or is silent for `try_s`."""
        faults: dict[str, Fault] = {}
        running: dict[asyncio.Task[Answer | Fault], Member] = {}
        failed: list[Member] = []
        pause_s = PAUSE_S[0]
        try:
            while (left := asked.deadline - self._loop.time()) > 0:
                if len(running) + len(failed) < len(self._members):
                    member = self.next_member(*running.values(), *failed)
                    running[self._loop.create_task(self._attempt(member, asked))] = member
                elif not running:
                    await asyncio.sleep(min(pause_s, left))
                    pause_s = min(pause_s * 2, PAUSE_S[1])
                    failed.clear()
                    continue
                began = self._loop.time()
                done, _ = await asyncio.wait(
                    running, timeout=min(left, self._settings.try_s), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    for member in running.values():
                        silent = self._silent(member, began)
                        if silent is not None and not self._is_told(member, faults):
                            faults[member.name] = silent
                for task in done:
                    member, found = running.pop(task), task.result()
                    if not isinstance(found, Fault):
                        self._served(member)
                        return found
                    faults[member.name] = found
                    failed.append(member)
                    if self._is_final(found, faults):
                        return error_of(faults if found.help is not Help.NOTHING else {member.name: found})
        finally:
            for task in running:
                task.cancel()
        return self._too_late(asked, faults, maybe_done=False)

    async def _write(self, asked: Asked) -> Answer | StoreError:
        """Try one endpoint after the other until one may have got it."""
        faults: dict[str, Fault] = {}
        failed: list[Member] = []
        pause_s = PAUSE_S[0]
        while (left := asked.deadline - self._loop.time()) > 0:
            if len(failed) == len(self._members):
                await asyncio.sleep(min(pause_s, left))
                pause_s = min(pause_s * 2, PAUSE_S[1])
                failed.clear()
                continue
            member = self.next_member(*failed)
            found = await self._attempt(member, asked)
            if not isinstance(found, Fault):
                self._served(member)
                return found
            faults[member.name] = found
            failed.append(member)
            if found.maybe_done or found.help is Help.NOTHING:
                return error_of({member.name: found})
            if self._is_final(found, faults):
                return error_of(faults)
        return self._too_late(asked, faults, maybe_done=False)

    def _is_final(self, found: Fault, faults: dict[str, Fault]) -> bool:
        if found.help is Help.NOTHING:
            return True
        return len(faults) == len(self._members) and all(fault.is_lasting for fault in faults.values())

    @staticmethod
    def _is_told(member: Member, faults: dict[str, Fault]) -> bool:
        """Whether it is known already that a member is silent, perhaps in better words."""
        return member.name in faults and faults[member.name].trouble is Trouble.TIMEOUT

    def _too_late(self, asked: Asked, faults: dict[str, Fault], *, maybe_done: bool) -> StoreError:
        unknown = Fault(Trouble.TIMEOUT, "no answer")
        told = {member.name: faults.get(member.name, unknown) for member in self._members}
        return error_of(told, within_s=asked.timeout_s)._replace(maybe_done=maybe_done)

    async def _attempt(self, member: Member, asked: Asked) -> Answer | Fault:
        """One request to one endpoint."""
        found: Answer | Fault | None = await member.connected(asked.deadline)
        found = found or await self._identities.check(member, asked.deadline) or await self._send_as_user(member, asked)
        if isinstance(found, Fault) and found.help is not Help.NOTHING:
            member.is_bad()
        return found

    async def _send_as_user(self, member: Member, asked: Asked) -> Answer | Fault:
        """Send a request, and once more with a new token where etcd refuses the one we have."""
        refused = Fault(Trouble.DENIED, "no token")
        for _ in range(TOKEN_TRIES):
            fault = await self._authenticated(member, asked.deadline)
            if fault is not None:
                return fault
            token = self._token
            found = await self._send(member, asked)
            if not (isinstance(found, Fault) and self._settings.user and found.is_of_token):
                return found
            refused = found
            if self._token == token:
                self._token = None
        return refused._replace(help=Help.ANOTHER_ENDPOINT)

    async def _send(self, member: Member, asked: Asked) -> Answer | Fault:
        left = asked.deadline - self._loop.time()
        if left <= 0:
            return Fault(Trouble.TIMEOUT, "no answer")
        connection = member.connection
        call = member.call(asked.method, asked.message, left, self._with_token())
        try:
            reply = await (call if asked.repeatable else self._guarded(member, call, asked.deadline))
        except (RpcError, GivenUp) as error:
            fault = fault_of_error(error)
            if isinstance(asked.request, RevokeLease) and fault.trouble is Trouble.NO_LEASE:
                return LeaseRevoked(self._revision)
            return fault._replace(maybe_done=fault.maybe_done and not asked.repeatable)
        if reply is None:
            member.reconnect(connection)
            return Fault(Trouble.TIMEOUT, "no answer", maybe_done=True)
        if (stranger := self._identities.heard(member, reply.header.cluster_id)) is not None:
            return stranger._replace(maybe_done=not asked.repeatable)
        self._revision = reply.header.revision
        return messages.decode(asked.request, reply)

    async def _guarded(self, member: Member, call: Any, deadline: float) -> Any:
        """The answer to a write, or None once the endpoint gives no sign of life: the answer will not come."""
        half_try_s = self._settings.try_s / 2
        sent = self._loop.create_task(call)
        try:
            while True:
                await asyncio.wait({sent}, timeout=half_try_s)
                if sent.done():
                    return sent.result()
                if member.heard_at >= self._loop.time() - half_try_s:
                    continue
                alive = self._loop.create_task(member.is_alive())
                await asyncio.wait({sent, alive}, return_when=asyncio.FIRST_COMPLETED)
                if not sent.done() and not alive.result():
                    return None
        finally:
            sent.cancel()
            sent.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, and of no interest

    # --- who we are ------------------------------------------------------------------------------------------------

    def _with_token(self) -> Metadata:
        return (_LEADER_WANTED, ("token", self._token)) if self._token else (_LEADER_WANTED,)

    async def metadata(self, member: Member, deadline: float) -> Metadata | None:
        """What goes with a call; None: there is no token now, or this is another cluster's endpoint."""
        if await self._identities.check(member, deadline) is not None:
            member.is_bad()
            return None
        return self._with_token() if await self._authenticated(member, deadline) is None else None

    def drop_token(self) -> bool:
        """Forget the token; returns False where there are no users."""
        if self._settings.user:
            self._token = None
        return bool(self._settings.user)

    async def _authenticated(self, member: Member, deadline: float) -> Fault | None:
        """Have a token, where there is a user; None: there is one."""
        if self._token is not None:
            return None
        async with self._asking[member]:
            left = deadline - self._loop.time()
            if self._token is not None or left <= 0:
                return None if left > 0 else Fault(Trouble.TIMEOUT, "no answer")
            user = messages.AUTHENTICATE.request(name=self._settings.user, password=self._settings.password)
            try:
                reply = await member.call(messages.AUTHENTICATE, user, left, ())
            except (RpcError, GivenUp) as error:
                fault = fault_of_error(error)
                if not fault.is_without_users:
                    return fault._replace(maybe_done=False)
                self._token = ""
            else:
                self._token = reply.token
            return None
