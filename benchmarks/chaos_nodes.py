"""Faults of nodes, of their network and of etcd, at random but by seed; each run must end as it should.

    python benchmarks/chaos_nodes.py --seed 1 --count 100     scenarios 1 to 100
    python benchmarks/chaos_nodes.py --seed 37 --count 1      scenario 37 alone, as a failure tells to do

Each node and each of three etcd members is a network namespace of its own. While faults happen anything may stop, but
never may two worlds live at once; when they are over, the job must find together in its full size, end with 0 on every
node that is left, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nodes_plan import COSTS_A_RESTART, LEASE_S, OUTAGE_LIMIT_S, REMOVES, Fault, Kind, Plan, draw
from nodes_scene import (
    DLAUNCH,
    MEMBERS,
    ROOT,
    HostedEtcd,
    Hosts,
    Life,
    Node,
    NodesJob,
    NoHosts,
    NotInTime,
    children,
    now,
    overlaps,
)
from process_tree import adopt_orphans

PROGRAM = ROOT / "tests" / "nodes_worker.py"
NAMES = ("a", "b", "c", "d", "f")
TOGETHER_LIMIT_S = 120.0  # to find together in full size, on a loaded machine
END_LIMIT_S = 60.0
RUNS_ON_S = 0.5  # what a host that was frozen as a whole needs to kill its workers once it continues
OUTPUT_OF_OURS = ("Traceback (most recent call last)", "this is a bug of dlaunch")


def main() -> int:
    arguments = _parse_arguments()
    plans = [draw(seed) for seed in range(arguments.seed, arguments.seed + arguments.count)]
    if arguments.list:
        print(*(f"seed {plan.seed}: {plan}" for plan in plans), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the blocks that clear up
    adopt_orphans()
    begun_at, failed = now(), []
    with Hosts((*NAMES, *MEMBERS)) as hosts, HostedEtcd(hosts, MEMBERS) as etcd:
        for plan in plans:
            if not _passes(plan, hosts, etcd, arguments.stories):
                failed.append(plan)
    struck = Counter(fault.kind.value for plan in plans for fault in plan.faults)
    print(f"{len(plans)} scenarios in {now() - begun_at:.0f} s, {len(failed)} failed")
    print("  faults:", ", ".join(f"{name}: {count}" for name, count in struck.most_common()))
    for plan in failed:
        print(f"  failed: seed {plan.seed}: {plan}")
    return 1 if failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Strike nodes, network and etcd of real runs, and check how they end.")
    parser.add_argument("--seed", type=int, default=1, help="of the first scenario; the others follow one by one")
    parser.add_argument("--count", type=int, default=100, help="how many scenarios")
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run none")
    parser.add_argument("--stories", action="store_true", help="tell what happened even where nothing is wrong")
    return parser.parse_args()


def _passes(plan: Plan, hosts: Hosts, etcd: HostedEtcd, tell_all: bool) -> bool:
    begun_at = now()
    run = ChaosRun(plan, hosts, etcd)
    try:
        run.carry_out()
        story = run.story()
    finally:
        run.close()
    print(f"seed {plan.seed:<5} {'FAILED' if run.wrong else 'ok':<6} {now() - begun_at:5.1f} s  {plan}", flush=True)
    if run.wrong:
        print("    wrong:", *run.wrong, sep="\n      ")
    if run.wrong or tell_all:
        print("    what happened:", *story.splitlines(), sep="\n      ")
        print(f"    again: make chaos-nodes SEED={plan.seed} COUNT=1", flush=True)
    return not run.wrong


class ChaosRun:
    """One scenario with real processes."""

    def __init__(self, plan: Plan, hosts: Hosts, etcd: HostedEtcd) -> None:
        self.wrong: list[str] = []
        self._plan = plan
        self._hosts = hosts
        self._etcd = etcd
        self._folder = Path(tempfile.mkdtemp(prefix=f"dlaunch-chaos-nodes-{plan.seed}-"))
        self._job = NodesJob(self._folder, self._command(), PROGRAM)
        self._codes: dict[int, int] = {}  # by the launcher's pid: what it must end with, where that is not 0
        self._told: list[tuple[float, str]] = []
        self._continued: dict[str, float] = {}  # when a host that was frozen as a whole went on
        self._mends: list[tuple[float, Callable[[], object]]] = []  # what lasts for a while, and when it is over

    def _command(self) -> list[str]:
        plan = self._plan
        return [
            *DLAUNCH,
            f"--nnodes={plan.least}:{plan.most}",
            f"--nproc-per-node={plan.nproc}",
            f"--max-restarts={plan.max_restarts}",
            "--no-early-stop",
            "--start-method=exec",
            "--rdzv-backend=etcd",
            f"--rdzv-endpoint={','.join(self._etcd.endpoints)}",
            f"--rdzv-id={uuid.uuid4().hex[:12]}",
            "--rdzv-conf=last_call_timeout=0.5",
            f"--lease-ttl={LEASE_S:g}",
            f"--outage-limit={OUTAGE_LIMIT_S:g}",
            f"--log-dir={self._folder / 'logs'}",
        ]

    def carry_out(self) -> None:
        """All of it, and judge."""
        try:
            for name in NAMES[: self._plan.nodes]:
                self._start(name)
            self._together()
            for fault in self._plan.faults:
                self._pause(fault.after_s)
                self._strike(fault)
            self._pause(max((at for at, _mend in self._mends), default=0.0) - now())
            if self._plan.max_restarts:
                self._replace_the_lost()
                self._together()
                self._job.put("finish")
            self._end()
        except NotInTime as problem:
            self.wrong.append(str(problem).partition("\n")[0])
        self._judge()

    # --- the job ---------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> Node:
        self._tell(f"a node is started on {name}")
        number = len(self._job.nodes)
        return self._job.start(name, f"--summary-json={number}.json", prefix=self._hosts[name].prefix)

    def _staying(self) -> list[Node]:
        """Launchers that are there, and are to stay."""
        return [node for node in self._job.nodes if node.pid not in self._codes]

    def _replace_the_lost(self) -> None:
        free = [name for name in NAMES if name not in {node.name for node in self._staying()}]
        while len(self._staying()) < self._plan.least:
            self._start(free.pop(0))

    def _together(self) -> None:
        """Wait until the workers that live are one world of the size that the nodes allow, and stay it for a moment."""
        size = min(self._plan.most, len(self._staying())) * self._plan.nproc
        since: list[float] = []

        def whole() -> bool:
            living = set(self._job.processes())
            lives = [life for life in self._job.lives() if life.pid in living]
            is_whole = {life.rank for life in lives} == set(range(size)) == set(range(len(lives)))
            is_whole = (
                is_whole and len({life.world for life in lives}) == 1 and {life.world_size for life in lives} == {size}
            )
            since[:] = since[:1] or [now()] if is_whole else []
            return bool(since) and now() - since[0] > 0.3

        self._job.until(f"one world of {size}", whole, TOGETHER_LIMIT_S)
        self._tell(f"there is one world of {size}")

    # --- the faults ------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        staying = self._staying()
        if not staying and fault.kind in _OF_A_NODE:
            self._tell(f"nobody is there: {fault.kind.value}")
            return
        node = staying[int(fault.victim * len(staying))] if staying else None
        self._tell(f"{fault}{f': {node.name}, pid {node.pid}' if node and fault.kind in _OF_A_NODE else ''}")
        if fault.kind in REMOVES and node:
            self._codes[node.pid] = 128 + signal.SIGTERM if fault.kind is Kind.LEAVE else -signal.SIGKILL
        match fault.kind:
            case Kind.JOIN:
                free = [name for name in NAMES if name not in {one.name for one in staying}]
                if free:
                    self._start(free[0])
            case Kind.KILL_LEADER | Kind.STOP_MEMBER | Kind.ETCD_AWAY:
                self._strike_etcd(fault)
            case _:
                assert node
                self._strike_node(fault, node)

    def _strike_node(self, fault: Fault, node: Node) -> None:
        hosts = self._hosts
        peers = [name for name in NAMES if name != node.name]
        match fault.kind:
            case Kind.KILL_WORKER:
                self._kill(_one(self._job.workers_of(node), fault.victim))
            case Kind.KILL_GUARD:
                self._kill_pids(children(node.pid)[:1])
            case Kind.KILL_STARTER:
                self._kill_pids([pid for guard in children(node.pid) for pid in children(guard)][:1])
            case Kind.KILL_AGENT:
                node.signal(signal.SIGKILL)
            case Kind.KILL_NODE:
                node.signal_all(signal.SIGKILL)
            case Kind.LOSE_NODE:
                hosts.unplug(node.name)
                node.signal_all(signal.SIGKILL)
                self._later(lambda: hosts.plug(node.name), LEASE_S * 2)
            case Kind.LEAVE:
                node.signal(signal.SIGTERM)
            case Kind.FREEZE_AGENT:
                node.signal(signal.SIGSTOP)
                self._later(lambda: self._cont(node, node.signal), fault.lasts_s)
            case Kind.FREEZE_NODE:
                node.signal_all(signal.SIGSTOP)
                self._later(lambda: self._cont(node, node.signal_all), fault.lasts_s)
            case Kind.CUT_FROM_ETCD:
                hosts.cut(node.name, *MEMBERS)
                self._later(lambda: hosts.mend(node.name, *MEMBERS), fault.lasts_s)
            case Kind.CUT_FROM_PEERS:
                hosts.cut(node.name, *peers)
                self._later(lambda: hosts.mend(node.name, *peers), fault.lasts_s)
            case Kind.UNPLUG:
                hosts.unplug(node.name)
                self._later(lambda: hosts.plug(node.name), fault.lasts_s)

    def _strike_etcd(self, fault: Fault) -> None:
        etcd = self._etcd
        match fault.kind:
            case Kind.KILL_LEADER:
                struck = [etcd.leader()]
                etcd.kill(struck[0])
            case Kind.STOP_MEMBER:
                struck = [int(fault.victim * len(MEMBERS))]
                etcd.mend(struck[0])
                etcd.stop(struck[0])
            case _:
                struck = list(range(len(MEMBERS)))
                for member in struck:
                    etcd.kill(member)
        self._later(lambda: [etcd.mend(member) for member in struck], fault.lasts_s)

    def _later(self, mend: Callable[[], object], after_s: float) -> None:
        self._mends.append((now() + after_s, mend))

    def _pause(self, for_s: float) -> None:
        """Not to wait for something: the delays are the scenario. What is over meanwhile is mended, in this thread."""
        until = now() + for_s
        while True:
            self._mends.sort(key=lambda one: one[0])
            next_at = min(until, self._mends[0][0] if self._mends else until)
            time.sleep(max(0.0, next_at - now()))
            if not self._mends or self._mends[0][0] > next_at:
                return
            _at, mend = self._mends.pop(0)
            with contextlib.suppress(ProcessLookupError):
                mend()
            self._tell("mended")

    def _cont(self, node: Node, send: Callable[[int], None]) -> None:
        self._continued[node.name] = now()
        send(signal.SIGCONT)

    def _kill(self, life: Life | None) -> None:
        self._kill_pids([life.pid] if life else [])

    def _kill_pids(self, pids: list[int]) -> None:
        if not pids:
            self._tell("it is not there now")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        expected = 0 if self._plan.max_restarts else 128 + signal.SIGKILL
        for node in self._job.nodes:
            code = node.end(END_LIMIT_S)
            if code != (wanted := self._codes.get(node.pid, expected)):
                self.wrong.append(f"the launcher on {node.name} (pid {node.pid}) ended with {code}, not with {wanted}")
        self._tell("all launchers have ended")

    def _judge(self) -> None:
        for overlap in overlaps(self._job.lives()):
            continued_at = self._continued.get(overlap.earlier.host, float("inf"))
            if not continued_at <= overlap.at <= overlap.at + overlap.seconds <= continued_at + RUNS_ON_S:
                self.wrong.append(f"two worlds: {overlap}")
        for node in self._job.nodes:
            self.wrong += [f"{node.name} printed {text!r}" for text in OUTPUT_OF_OURS if text in node.output]
        if self.wrong:
            return
        self.wrong += [f"left behind: {process}" for process in self._job.left()]
        self._judge_restarts()

    def _judge_restarts(self) -> None:
        """Nodes that come and go cost nothing, and a failure costs one restart at most."""
        most = sum(fault.kind in COSTS_A_RESTART for fault in self._plan.faults)
        used = set()
        for number, node in enumerate(self._job.nodes):
            with contextlib.suppress(OSError):
                summary = json.loads((self._folder / f"{number}.json").read_text())
                if node.pid not in self._codes:
                    used.add(summary.get("restarts_used"))
        if len(used) > 1 or any(count is None or count > most for count in used):
            self.wrong.append(f"restarts used: {used}, though {most} at most were to be paid for")

    def story(self) -> str:
        """What was done, and what there was."""
        return "\n".join([*(f"{at:.3f} {what}" for at, what in self._told), self._job.story()])

    def _tell(self, what: str) -> None:
        self._told.append((now(), what))

    def close(self) -> None:
        """Nothing of it lives afterwards, and all is whole again."""
        for _at, mend in self._mends:
            with contextlib.suppress(ProcessLookupError):
                mend()
        self._job.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        for member in range(len(MEMBERS)):
            self._etcd.mend(member)
        self._etcd.wait_healthy()


_OF_A_NODE = frozenset(Kind) - {Kind.JOIN, Kind.KILL_LEADER, Kind.STOP_MEMBER, Kind.ETCD_AWAY}


def _one(lives: list[Life], fraction: float) -> Life | None:
    return lives[int(fraction * len(lives))] if lives else None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NoHosts, FileNotFoundError) as reason:
        sys.exit(f"chaos_nodes.py: {reason}")
