"""Whether all endpoints belong to one cluster: agents that meet in two would make two runs of one, unnoticed.

Every answer of etcd names the cluster that gave it (`ResponseHeader.cluster_id`; etcd, api/etcdserverpb/rpc.proto). Of
several endpoints each is asked before it is used, and again on a new connection: a write must not be sent first and
found to be in the wrong place later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from . import etcd_messages as messages
from .etcd_faults import Fault, Help, different_clusters, fault_of_cluster
from .etcd_member import GivenUp, Member, RpcError, fault_of_error
from .store import StoreError


class Identities:
    """Which cluster is ours, and which endpoints are of another. Lives on the loop of the client."""

    def __init__(self, members: Sequence[Member], try_s: float) -> None:
        self._members = members
        self._try_s = try_s
        self._loop = asyncio.get_running_loop()
        self._ours = 0  # until somebody has told us
        self._census: asyncio.Task[StoreError | None] | None = None

    async def ask_all(self, but: Member) -> StoreError | None:
        """Before the first request: an error where the endpoints that answer are of different clusters.

        It waits for half of `try_s` at most: who answers later is asked when it is used. Connections are kept to
        ``but`` alone.
        """
        if len(self._members) == 1:
            return None
        if self._census is None:
            self._census = self._loop.create_task(self._take_census(but))
        return await asyncio.shield(self._census)

    def close(self) -> None:
        """Ask nobody any more."""
        if self._census is not None:
            self._census.cancel()

    async def _take_census(self, but: Member) -> StoreError | None:
        asking = [self._loop.create_task(self._ask(member)) for member in self._members]
        try:
            await asyncio.wait(asking, timeout=self._try_s / 2)
        finally:
            for task in asking:
                task.cancel()
        found: dict[int, list[str]] = {}
        for member in self._members:
            if member.cluster_id:
                found.setdefault(member.cluster_id, []).append(member.name)
            if member is not but:
                member.reconnect(member.connection)
        if len(found) > 1:
            return different_clusters(found)
        self._ours = self._ours or next(iter(found), 0)
        return None

    async def _ask(self, member: Member) -> Fault | None:
        deadline = self._loop.time() + self._try_s
        return await member.connected(deadline) or await self._tell(member, self._try_s)

    async def _tell(self, member: Member, within_s: float) -> Fault | None:
        """Have a connected member name its cluster; None: it has, or will do so with its first answer."""
        try:
            reply = await member.call(messages.STATUS, messages.STATUS.request(), within_s, ())
        except (RpcError, GivenUp) as error:
            fault = fault_of_error(error)._replace(maybe_done=False)
            return None if fault.help in {Help.NOTHING, Help.NEW_TOKEN} else fault  # it tells nobody without a token
        member.cluster_id = reply.header.cluster_id
        return None

    async def check(self, member: Member, deadline: float) -> Fault | None:
        """What keeps us from using a connected endpoint, if anything does. Nothing was sent to it then."""
        if len(self._members) == 1:
            return None
        if not member.cluster_id:
            fault = await self._tell(member, max(0.0, min(self._try_s, deadline - self._loop.time())))
            if fault is not None:
                return fault
        return self.heard(member, member.cluster_id)

    def heard(self, member: Member, cluster_id: int) -> Fault | None:
        """A member has named its cluster; the fault, where that is not the one that we began with. 0: it has not."""
        member.cluster_id = cluster_id
        self._ours = self._ours or cluster_id
        return None if cluster_id in {0, self._ours} else fault_of_cluster(cluster_id, self._ours)
