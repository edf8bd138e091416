"""The faults: each is done to a job that trains, and says after how many seconds the whole new world trained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from nodes_scene import Node, Scene, now

LEASE_S = 5.0
SILENT_S = LEASE_S + 0.5
GONE = (-signal.SIGKILL,)
LEFT = (128 + signal.SIGTERM,)


class Case(NamedTuple):
    """One fault."""

    name: str
    title: str
    act: Callable[[Scene], float]  # seconds; for what may lose no step, the longest gap between two steps
    budget_s: float | None
    nnodes: str = "1:2"
    with_torchrun: bool = False  # whether torchrun has an answer to it at all
    no_step_lost: bool = False  # the number is the longest gap, and no worker may have been started anew
    full_only: bool = False


def _worker_killed(scene: Scene) -> float:
    scene.train("a", "b")
    victim = next(life for life in reversed(scene.world_now()) if life.rank == 1)
    struck_at = now()
    os.kill(victim.pid, signal.SIGKILL)
    return scene.trains_again(2, struck_at)


def _kill_agent(scene: Scene, node: Node) -> float:
    scene.expected_codes[node.name] = GONE
    struck_at = now()
    node.signal(signal.SIGKILL)
    return scene.trains_again(1, struck_at)


def _agent_killed(scene: Scene) -> float:
    scene.train("a", "b")
    if scene.arm.is_ours:
        return _kill_agent(scene, scene.by_group_rank(1))
    return _kill_agent(scene, scene.node_on("b"))  # torchrun: not the one that hosts its store


def _oldest_proposer_killed(scene: Scene) -> float:
    scene.train("a", "b")
    return _kill_agent(scene, scene.oldest_proposer())


def _store_server_killed(scene: Scene) -> float:
    scene.train("a", "b")
    return _kill_agent(scene, scene.by_group_rank(0))


def _first_node_killed(scene: Scene) -> float:
    scene.train("a", "b")
    node = scene.by_group_rank(0) if scene.arm.is_ours else scene.node_on("a")
    scene.expected_codes[node.name] = GONE
    struck_at = now()
    node.signal_all(signal.SIGKILL)
    return scene.trains_again(1, struck_at)


def _power_lost(scene: Scene) -> float:
    """The cable first, so that no FIN and no refusal tells of the end."""
    scene.train("a", "b")
    node = scene.node_on("b")
    scene.expected_codes[node.name] = GONE
    struck_at = now()
    scene.stage.hosts.unplug(node.name)
    try:
        node.signal_all(signal.SIGKILL)
        return scene.trains_again(1, struck_at)
    finally:
        scene.stage.hosts.plug(node.name)


def _left(scene: Scene) -> float:
    scene.train("a", "b")
    node = scene.by_group_rank(1) if scene.arm.is_ours else scene.node_on("b")
    scene.expected_codes[node.name] = LEFT
    struck_at = now()
    node.signal(signal.SIGTERM)
    return scene.trains_again(1, struck_at)


def _joined(scene: Scene) -> float:
    scene.train("a")
    struck_at = now()
    scene.start("b")
    if scene.arm.is_ours:
        since_registered = scene.until_registered(2)
        seconds = scene.trains_again(2, struck_at)
        scene.notes.append(f"{seconds:.1f} s from the start of its process, with torch's import")
        return struck_at + seconds - since_registered
    return scene.trains_again(2, struck_at)


def _spare_takes_over(scene: Scene) -> float:
    scene.train("a", "b")
    scene.start("c")
    scene.until_registered(3)
    time.sleep(0.5)  # the spare is as ready as it will be
    node = scene.by_group_rank(1)
    scene.expected_codes[node.name] = GONE
    struck_at = now()
    node.signal_all(signal.SIGKILL)
    return scene.trains_again(2, struck_at)


def _spare_takes_over_silently(scene: Scene) -> float:
    scene.train("a", "b")
    scene.start("c")
    scene.until_registered(3)
    time.sleep(0.5)
    node = scene.by_group_rank(1)
    scene.expected_codes[node.name] = GONE
    struck_at = now()
    scene.stage.hosts.unplug(node.name)
    try:
        node.signal_all(signal.SIGKILL)
        return scene.trains_again(2, struck_at)
    finally:
        scene.stage.hosts.plug(node.name)


def _goes_on_through(scene: Scene, begin: Callable[[], None], end: Callable[[], None], for_s: float) -> float:
    """Nothing may be restarted, and no step lost; then a worker is killed, to see that the job can still recover."""
    pids = {life.pid for life in scene.world_now()}
    begun_at = now()
    begin()
    try:
        scene.goes_on(pids, begun_at, begun_at + for_s)
    finally:
        end()
    until = now() + LEASE_S + 2.0
    scene.goes_on(pids, begun_at, until)
    gap = scene.longest_gap(pids, begun_at, until)
    struck_at = now()
    os.kill(max(scene.world_now(), key=lambda life: life.rank).pid, signal.SIGKILL)
    again = scene.trains_again(2, struck_at)
    scene.notes.append(f"a worker killed afterwards: {again:.2f} s")
    return gap


def _leader_killed(scene: Scene) -> float:
    scene.train("a", "b")
    etcd = scene.stage.etcd
    leader = etcd.leader()
    return _goes_on_through(scene, lambda: etcd.kill(leader), scene.stage.mend, 10.0)


def _member_stopped(scene: Scene) -> float:
    scene.train("a", "b")
    etcd = scene.stage.etcd
    leader = etcd.leader()
    return _goes_on_through(scene, lambda: etcd.stop(leader), lambda: etcd.cont(leader), 10.0)


def _etcd_away(for_s: float) -> Callable[[Scene], float]:
    def act(scene: Scene) -> float:
        scene.train("a", "b")

        def kill_all() -> None:
            for member in range(len(scene.stage.members)):
                scene.stage.etcd.kill(member)

        return _goes_on_through(scene, kill_all, scene.stage.mend, for_s)

    return act


def _cut_from_etcd(scene: Scene) -> float:
    scene.train("a", "b")
    hosts, members = scene.stage.hosts, scene.stage.members
    return _goes_on_through(scene, lambda: hosts.cut("b", *members), lambda: hosts.mend("b", *members), 12.0)


def _cut_from_peers(scene: Scene) -> float:
    """The workers cannot reach one another either, so they wait; nothing may be torn down for it."""
    scene.train("a", "b")
    pids = {life.pid for life in scene.world_now()}
    scene.stage.hosts.cut("a", "b")
    time.sleep(LEASE_S + 3.0)
    scene.stage.hosts.mend("a", "b")
    mended_at = now()

    def stepped() -> float | None:
        firsts = [next((t for t, _n in life.steps if t > mended_at), None) for life in scene.world_now()]
        return max(found) if firsts and len(found := [one for one in firsts if one is not None]) == 2 else None

    seconds = scene.job.until("both train again", stepped, scene.arm.limit_s) - mended_at
    anew = {life.pid for life in scene.job.lives()} - pids
    scene.notes.append("counted from the end of the cut; " + ("workers started anew" if anew else "the same workers"))
    return seconds


def _freeze(scene: Scene, node: Node, stop: Callable[[int], None]) -> float:
    """Frozen for longer than the lease: the other goes on alone; continued, it is taken in again."""
    struck_at = now()
    stop(signal.SIGSTOP)
    try:
        seconds = scene.trains_again(1, struck_at)
        time.sleep(max(0.0, struck_at + 8.0 - now()))
    finally:
        stop(signal.SIGCONT)
    continued_at = now()
    again = scene.trains_again(2, continued_at)
    scene.notes.append(f"continued after {continued_at - struck_at:.0f} s: two nodes again after {again:.1f} s")
    return seconds


def _agent_frozen(scene: Scene) -> float:
    scene.train("a", "b")
    node = scene.node_on("b")
    return _freeze(scene, node, node.signal)


def _node_frozen(scene: Scene) -> float:
    scene.train("a", "b")
    scene.may_overlap_s = 0.5
    node = scene.node_on("b")
    return _freeze(scene, node, node.signal_all)


def _cut_from_all(scene: Scene) -> float:
    scene.train("a", "b")

    def unplug(signum: int) -> None:
        (scene.stage.hosts.unplug if signum == signal.SIGSTOP else scene.stage.hosts.plug)("b")

    return _freeze(scene, scene.node_on("b"), unplug)


CASES = (
    Case("worker", "worker killed", _worker_killed, 0.5, "2:2", with_torchrun=True),
    Case("agent", "agent killed", _agent_killed, 1.0, with_torchrun=True),
    Case("proposer", "oldest proposer killed", _oldest_proposer_killed, 1.0),
    Case("store", "agent killed whose starter serves the workers' store", _store_server_killed, 1.0),
    Case("rank0", "rank-0 node killed, all its processes at once", _first_node_killed, 1.0, with_torchrun=True),
    Case("power", "node lost without a word (cable out, all killed)", _power_lost, SILENT_S),
    Case("left", "node left gracefully (SIGTERM)", _left, 0.5, with_torchrun=True),
    Case("joined", "node joined, from its registration", _joined, 1.0, with_torchrun=True),
    Case("spare", "node killed, spare takes over", _spare_takes_over, 1.0, "2:2"),
    Case("spare-silent", "node lost without a word, spare takes over", _spare_takes_over_silently, SILENT_S, "2:2"),
    Case("leader", "etcd leader killed (of three)", _leader_killed, None, no_step_lost=True),
    Case("stopped", "etcd leader stopped with SIGSTOP, 10 s", _member_stopped, None, no_step_lost=True),
    Case("etcd-3", "etcd all down for 3 s", _etcd_away(3.0), None, no_step_lost=True),
    Case("etcd-15", "etcd all down for 15 s", _etcd_away(15.0), None, no_step_lost=True),
    Case("etcd-60", "etcd all down for 60 s", _etcd_away(60.0), None, no_step_lost=True, full_only=True),
    Case("agent-frozen", "agent frozen for 8 s: the others go on", _agent_frozen, SILENT_S),
    Case("node-frozen", "node frozen for 8 s: the others go on", _node_frozen, SILENT_S),
    Case("cut-etcd", "node cut off from etcd only, 12 s", _cut_from_etcd, None, no_step_lost=True),
    Case("cut-peers", "node cut off from its peers only, 8 s", _cut_from_peers, None),
    Case("cut-all", "node cut off from all: the others go on", _cut_from_all, SILENT_S),
)
