"""The private etcd of a run without one: on one host, out of reach where that is, and gone when its agent is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import Leases

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Agent, Host


class PrivateStore:
    """Where the store is, and what becomes of it with its host. Nothing of it outlives its agent."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self._cluster, self._index = cluster, index
        self._serves: Agent | None = None  # whose child it is
        self._was_there = False
        cluster.etcd.up, cluster.etcd.refuses = False, True
        cluster.network.when_cut_or_mended.append(self._ways_changed)

    def is_on(self, host: Host) -> bool:
        """Whether it is this host's."""
        return host.index == self._index

    def can_run(self) -> bool:
        """Whether its agent lives, and its host runs."""
        return self._serves is not None and not self._serves.host.is_frozen

    def agent_starts(self, agent: Agent) -> None:
        """An agent starts: on that host, with an etcd that knows nothing."""
        if self.is_on(agent.host):
            self._serves = agent
            if self._was_there:
                self._cluster.invariants.is_restored = True  # all is forgotten, and agents of old may still train
                self._cluster.invariants.registered.clear()
            self._was_there = True
            self._cluster.etcd.begin_anew()
        else:
            agent.client.set_host_cut(self._cluster.network.is_cut(agent.place, self._index))

    def agent_is_gone(self, agent: Agent) -> None:
        """The store ends with its agent."""
        if agent is self._serves:
            self._serves = None
            self._cluster.etcd.stop(refuses=agent.host.has_power)

    def freeze_changed(self, host: Host) -> None:
        """A host that stands still answers nothing."""
        if self._serves is None or not self.is_on(host):
            return
        etcd = self._cluster.etcd
        if host.is_frozen and etcd.up:
            etcd.stop(refuses=False)
        elif not host.is_frozen and not etcd.up:
            etcd.start(Leases.LAPSED)

    def _ways_changed(self) -> None:
        network = self._cluster.network
        for agent in self._cluster.agents:
            if agent.lives:
                agent.client.set_host_cut(network.is_cut(agent.place, self._index))
