"""How nodes meet is checked once, at birth."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dlaunch.errors import UsageError
from dlaunch.spec import JobSpec, Program, ProgramKind, RendezvousSpec

GOOD = RendezvousSpec(2, 4, ("e1:2379", "[::1]:2379"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"min_nodes": 0}, "--nnodes is 0:4."),
        ({"min_nodes": 5}, "--nnodes is 5:4."),
        ({"endpoints": ()}, "--rdzv-endpoint names 0 places."),
        ({"embedded": True}, "--rdzv-endpoint names 2 places."),
        ({"endpoints": ("e1",)}, "--rdzv-endpoint holds 'e1'."),
        ({"endpoints": ("::1:2379",)}, "--rdzv-endpoint holds '::1:2379'."),
        ({"lease_ttl_s": 1.9}, "--lease-ttl is 1.9."),
        ({"lease_ttl_s": float("nan")}, "--lease-ttl is nan."),
        ({"outage_limit_s": -1.0}, "--outage-limit is -1."),
        ({"join_settle_s": -1.0}, "--join is -1."),
        ({"settle_s": -1.0}, "--rdzv-conf last_call_timeout is -1."),
        ({"timeout_s": 0.0}, "--rdzv-timeout is 0."),
        ({"cool_down_s": -1.0}, "--cool-down is -1."),
        ({"max_node_failures": 0}, "--max-node-failures is 0."),
        ({"node_rank": -1}, "--node-rank is -1."),
        ({"cert_file": Path("c")}, "--rdzv-cert is given without --rdzv-key."),
        ({"key_file": Path("k")}, "--rdzv-key is given without --rdzv-cert."),
        ({"user": "root"}, "--rdzv-user is 'root', but there is no password."),
        ({"password": "hunter2"}, "There is a password for etcd, but no user."),
        ({"password_file": Path("p")}, "There is a password for etcd, but no user."),
    ],
)
def test_a_value_that_cannot_be_is_born(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        dataclasses.replace(GOOD, **changes)
    assert refusal.value.sentence == sentence
    assert "hunter2" not in str(refusal.value)


def test_tls_is_not_used_with_a_file_of_it() -> None:
    assert not GOOD.tls
    assert dataclasses.replace(GOOD, https=True).tls
    assert dataclasses.replace(GOOD, ca_file=Path("c")).tls
    assert dataclasses.replace(GOOD, cert_file=Path("c"), key_file=Path("k")).tls


def test_a_job_has_other_nodes_than_its_meeting() -> None:
    job = JobSpec(Program(ProgramKind.SCRIPT, "train.py"), rendezvous=GOOD)
    assert (job.min_nodes, job.max_nodes) == (2, 4)
