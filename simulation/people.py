"""What people do to a run's keys while it runs: they stop it, delete what is not theirs, and write garbage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlaunch.rendezvous.store import Delete, Put, Txn

if TYPE_CHECKING:
    from .cluster import Cluster
    from .node import Host

# Names that sort before ours and after them; no agent would write them.
_BEFORE = tuple(f"nodes/!{number}" for number in range(20))
_PLACES = (*_BEFORE, "nodes/zz", "report/1/zz/failed", "report/x/y", "assign/x/y", "away/zz", "control/x", "zz")
_GARBAGE = (b"", b"null", b"\xff\xfe", b'{"phase": 7}', b"[" * 2000, b"x" * 10_000)
STOP_WISH = "somebody wants it to end"


class People:
    """Users and strangers, with a client of the store of their own that nothing is in the way of."""

    def __init__(self, cluster: Cluster) -> None:
        self.client = cluster.etcd.client("somebody")
        self._cluster = cluster

    def _do(self, operation: Put | Delete) -> None:
        etcd = self._cluster.etcd
        if etcd.up:
            etcd.perform(self.client, Txn((), (operation,)))

    def write_garbage(self) -> None:
        """Beside the keys that count, not in their place: that ends a run, with a sentence."""
        dice = self._cluster.dice
        self._do(Put(self._cluster.keys.root + dice.choice(_PLACES), dice.choice(_GARBAGE)))

    def delete_registration(self, host: Host) -> None:
        """By hand: the lease that it stood on goes on."""
        if host.agent is not None and host.agent.node_id:
            self._do(Delete(self._cluster.keys.node(host.agent.node_id)))

    def stop_run(self) -> None:
        """A wish that the run ends."""
        self._do(Put(self._cluster.keys.stop, STOP_WISH.encode()))
