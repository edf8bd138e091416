"""From settings to how several nodes meet: tables over a pure function."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlaunch.errors import UsageError
from dlaunch.launcher.options import OPTIONS
from dlaunch.launcher.settings import Given
from dlaunch.launcher.specify import specify
from dlaunch.spec import JobSpec, JoinPolicy, RendezvousSpec

ETCD: Given = {"nnodes": "2", "rdzv_endpoint": "e1:2379", "rdzv_id": "exp7"}
PRIVATE: Given = {"nnodes": "2", "rdzv_endpoint": "node0"}


def job(given: Given, environ: dict[str, str] | None = None) -> JobSpec:
    return specify(given, ["train.py"], environ or {}, interpreter="/usr/bin/python3", new_run_id="new")


def meeting(given: Given, environ: dict[str, str] | None = None) -> RendezvousSpec:
    rendezvous = job(given, environ).rendezvous
    assert rendezvous is not None
    return rendezvous


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nnodes": "1"},
        {"nnodes": "1:1"},
        {"nnodes": "1:1", "rdzv_backend": "etcd", "rdzv_endpoint": "e1:2379"},
        {"rdzv_backend": "etcd", "rdzv_endpoint": "e1,e2,e3", "rdzv_user": "root", "rdzv_ca": "nowhere"},
        {"standalone": True},
    ],
)
def test_one_node_needs_a_store(given: Given) -> None:
    spec = job(given)
    assert spec.rendezvous is None
    assert (spec.min_nodes, spec.max_nodes) == (1, 1)
    assert spec.run_id == "new"


@pytest.mark.parametrize("backend", [None, "etcd", "etcd-v2"])
def test_the_command_of_the_manual_is_not_understood(backend: str | None) -> None:
    spec = job(
        {
            "nnodes": "2:4",
            "nproc_per_node": "2",
            "rdzv_backend": backend,
            "rdzv_endpoint": "e1:2379,e2:2379,e3:2379",
            "rdzv_id": "exp7",
        }
    )
    assert spec.rendezvous == RendezvousSpec(2, 4, ("e1:2379", "e2:2379", "e3:2379"))
    assert (spec.run_id, spec.min_nodes, spec.max_nodes) == ("exp7", 2, 4)
    assert (spec.master_addr, spec.master_port) == ("", 0)


def test_a_member_of_etcd_is_named_twice() -> None:
    assert meeting({**ETCD, "rdzv_endpoint": "e1,e2,e1:2379"}).endpoints == ("e1:2379", "e2:2379")


def test_a_job_that_may_grow_is_taken_for_one_node() -> None:
    assert meeting({**PRIVATE, "nnodes": "1:2"}).min_nodes == 1


def test_the_defaults_of_several_nodes_are_others_than_documented() -> None:
    spec = meeting(ETCD)
    assert (spec.lease_ttl_s, spec.outage_limit_s, spec.timeout_s, spec.settle_s) == (5.0, 120.0, 600.0, 2.0)
    assert (spec.join, spec.max_node_failures, spec.cool_down_s) == (JoinPolicy.NOW, None, 600.0)
    assert (spec.key_prefix, spec.node_rank, spec.local_addr, spec.is_host) == ("/dlaunch", None, None, None)
    assert not spec.tls


def test_a_default_of_the_table_is_another_than_of_the_value() -> None:
    defaults = {option.dest: option.default for option in OPTIONS}
    explicit = {dest: defaults[dest] for dest in ("lease_ttl", "outage_limit", "rdzv_timeout", "join", "cool_down")}
    assert meeting({**ETCD, **explicit}) == RendezvousSpec(2, 2, ("e1:2379",))


def test_a_flag_does_not_reach_the_meeting() -> None:
    spec = meeting(
        {
            **ETCD,
            "rdzv_timeout": "60",
            "local_addr": "[fd00::1]",
            "node_rank": "3",
            "join": "30",
            "outage_limit": "0",
            "lease_ttl": "2",
            "max_node_failures": "4",
            "cool_down": "10",
            "rdzv_user": "root",
            "rdzv_password_file": "password",
            "rdzv_ca": "ca.pem",
            "rdzv_cert": "cert.pem",
            "rdzv_key": "key.pem",
        }
    )
    assert spec == RendezvousSpec(
        2,
        2,
        ("e1:2379",),
        node_rank=3,
        local_addr="fd00::1",
        ca_file=Path("ca.pem"),
        cert_file=Path("cert.pem"),
        key_file=Path("key.pem"),
        user="root",
        password_file=Path("password"),
        lease_ttl_s=2.0,
        outage_limit_s=0.0,
        join=JoinPolicy.SETTLE,
        join_settle_s=30.0,
        timeout_s=60.0,
        max_node_failures=4,
        cool_down_s=10.0,
    )
    assert spec.tls


@pytest.mark.parametrize(
    ("given", "endpoint", "embedded"),
    [
        # etcd by name, by number, by port
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "e1"}, "e1:2379", False),
        ({"rdzv_backend": "etcd-v2", "rdzv_endpoint": "e1:4000"}, "e1:4000", False),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "[::1]"}, "[::1]:2379", False),
        ({"rdzv_endpoint": "e1,e2"}, "e1:2379", False),
        ({"rdzv_endpoint": "e1:2379"}, "e1:2379", False),
        # one of the nodes
        ({"rdzv_endpoint": "node0"}, "node0:29400", True),
        ({"rdzv_endpoint": "node0:1234"}, "node0:1234", True),
        ({"rdzv_endpoint": "node0", "master_port": "1234"}, "node0:1234", True),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "node0"}, "node0:29400", True),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "node0:2379"}, "node0:2379", True),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "[::1]:1"}, "[::1]:1", True),
        (
            {"rdzv_backend": "c10d", "rdzv_endpoint": "node0", "master_addr": "x", "master_port": "1"},
            "node0:29400",
            True,
        ),
        # static
        ({"master_addr": "node0"}, "node0:29500", True),
        ({"master_addr": "node0", "master_port": "1234"}, "node0:1234", True),
        ({"master_addr": "::1", "node_rank": "1"}, "[::1]:29500", True),
        ({"rdzv_backend": "static", "master_addr": "node0"}, "node0:29500", True),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0", "master_addr": "x"}, "node0:29500", True),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0", "master_port": "1"}, "node0:1", True),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0:2379"}, "node0:2379", True),
    ],
)
def test_nodes_meet_elsewhere(given: dict[str, str], endpoint: str, embedded: bool) -> None:
    spec = meeting({"nnodes": "2", "rdzv_id": "a", **given})
    assert (spec.endpoints[0], spec.embedded) == (endpoint, embedded)


def test_the_variables_of_a_kubernetes_operator_are_not_read() -> None:
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "auto",
    }
    spec = meeting({}, environ)
    assert (spec.endpoints, spec.embedded, spec.node_rank, spec.is_host) == (("job-master-0:23456",), True, 0, True)


@pytest.mark.parametrize(
    ("given", "is_host"),
    [
        ({}, None),
        ({"rdzv_conf": "is_host=1"}, True),
        ({"rdzv_conf": "is_host=false"}, False),
        ({"node_rank": "0"}, True),
        ({"node_rank": "1"}, False),
        ({"node_rank": "1", "rdzv_conf": "is_host=true"}, True),
        ({"node_rank": "1", "rdzv_backend": "c10d"}, None),  # where torchrun gives a rank no meaning
        ({"rdzv_endpoint": "e1,e2", "rdzv_id": "a", "node_rank": "0"}, None),
    ],
)
def test_another_node_runs_the_private_etcd(given: dict[str, str], is_host: bool | None) -> None:
    assert meeting({**PRIVATE, **given}).is_host is is_host


def test_a_node_rank_that_was_not_given_counts() -> None:
    assert meeting(PRIVATE).node_rank is None
    assert meeting({**PRIVATE, "node_rank": "0"}).node_rank == 0


def test_a_spare_of_a_dynamic_run_may_not_have_a_rank() -> None:
    assert meeting({**PRIVATE, "rdzv_backend": "c10d", "node_rank": "7"}).node_rank == 7


def test_nodes_of_one_run_have_different_ids() -> None:
    assert job(PRIVATE).run_id == "none"
    assert job({**PRIVATE, "rdzv_id": "exp7"}).run_id == "exp7"


@pytest.mark.parametrize("run_id", ["a/b", "a\nb", "x" * 256])
def test_a_run_id_that_cannot_be_a_part_of_a_key_is_taken(run_id: str) -> None:
    with pytest.raises(UsageError) as refusal:
        job({**ETCD, "rdzv_id": run_id})
    assert refusal.value.sentence.startswith("--rdzv-id is ")


@pytest.mark.parametrize(
    ("conf", "flags", "lease_ttl_s", "timeout_s"),
    [
        ("keep_alive_interval=4,join_timeout=60", {}, 12.0, 60.0),
        ("keep_alive_interval=4,join_timeout=60", {"lease_ttl": "5", "rdzv_timeout": "600"}, 5.0, 600.0),
        ("keep_alive_interval=4,join_timeout=60", {"lease_ttl": "3"}, 3.0, 60.0),
    ],
)
def test_the_conf_beats_a_flag(conf: str, flags: dict[str, str], lease_ttl_s: float, timeout_s: float) -> None:
    spec = meeting({**ETCD, "rdzv_conf": conf, **flags})
    assert (spec.lease_ttl_s, spec.timeout_s) == (lease_ttl_s, timeout_s)


def test_the_conf_does_not_reach_the_meeting() -> None:
    conf = "protocol=https,ca_cert=ca,ssl_cert=cert,ssl_cert_key=key,etcd_prefix=team,last_call_timeout=0"
    spec = meeting({**ETCD, "rdzv_conf": conf})
    assert (spec.ca_file, spec.cert_file, spec.key_file) == (Path("ca"), Path("cert"), Path("key"))
    assert (spec.https, spec.tls, spec.key_prefix, spec.settle_s) == (True, True, "/team", 0.0)


def test_the_password_of_the_variable_is_not_taken_or_is_shown() -> None:
    spec = job({**ETCD, "rdzv_user": "root"}, {"DLAUNCH_RDZV_PASSWORD": "hunter2"})
    assert spec.rendezvous is not None
    assert spec.rendezvous.password == "hunter2"
    assert "hunter2" not in f"{spec!r} {spec} {spec.rendezvous!r}"


def test_the_password_of_the_variable_beats_the_file() -> None:
    given = {**ETCD, "rdzv_user": "root", "rdzv_password_file": "file"}
    spec = meeting(given, {"DLAUNCH_RDZV_PASSWORD": "hunter2"})
    assert (spec.password, spec.password_file) == (None, Path("file"))


def test_the_password_of_the_variable_troubles_a_private_etcd() -> None:
    assert meeting(PRIVATE, {"DLAUNCH_RDZV_PASSWORD": "hunter2"}).password is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "a,b"}, "--rdzv-endpoint is 'a,b'."),
        ({"rdzv_endpoint": "node0:0"}, "--rdzv-endpoint is 'node0:0'."),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "e1:0"}, "--rdzv-endpoint is 'e1:0'."),
        ({"master_addr": "node0", "master_port": "0", "rdzv_endpoint": None}, "--master-port is '0'."),
        ({"node_rank": "2"}, "--node-rank is '2'."),
        ({"rdzv_user": "root"}, "--rdzv-user is for an etcd of yours, and this run starts a private one."),
        ({"rdzv_ca": "ca"}, "--rdzv-ca is for an etcd of yours, and this run starts a private one."),
        (
            {"rdzv_conf": "protocol=https"},
            "TLS in --rdzv-conf is for an etcd of yours, and this run starts a private one.",
        ),
        ({"rdzv_endpoint": "e1,e2", "rdzv_id": "a", "rdzv_cert": "c"}, "--rdzv-cert is given without --rdzv-key."),
        ({"rdzv_endpoint": "e1,e2", "rdzv_id": "a", "rdzv_key": "k"}, "--rdzv-key is given without --rdzv-cert."),
        (
            {"rdzv_endpoint": "e1,e2", "rdzv_id": "a", "rdzv_password_file": "p"},
            "There is a password for etcd, but no user.",
        ),
        ({"standalone": True}, "--standalone is for one node, and --nnodes is '2'."),
    ],
)
def test_a_contradiction_of_several_nodes_is_taken(given: dict[str, str | bool | None], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        job({**PRIVATE, **given})
    assert refusal.value.sentence == sentence
    assert refusal.value.fix
