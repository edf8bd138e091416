"""Takes part in a run of several nodes: from the specification to the outcome, with what such a run needs around it."""

from __future__ import annotations

import os
from pathlib import Path

from dlaunch.addresses import host_and_port
from dlaunch.outcome import Outcome
from dlaunch.rendezvous.endpoints import EtcdSettings
from dlaunch.rendezvous.member import Member, MemberSettings, NodeInfo
from dlaunch.rendezvous.records import Join, RunSettings
from dlaunch.rendezvous.store import Store
from dlaunch.rendezvous_spec import RendezvousSpec
from dlaunch.secret import password_of
from dlaunch.spec import JobSpec

from .console import Console
from .coupling import Coupling
from .etcd_server import AlreadyServed, EtcdServer, EtcdState, owns_endpoint
from .layout import RunDirectory
from .local_address import local_address
from .machine import Settings
from .node_loop import Deliver, NodeLoop
from .node_machine import NodeMachine
from .record import RunRecord
from .signals import SignalSource
from .starter import Starter
from .writer import FileWriter

SERVER_S = 30.0  # how long a private etcd may take to be ready
CONNECT_S = 15.0  # how long an etcd of the user's may be out of reach at first


def run_member(
    spec: JobSpec,
    settings: Settings,
    console: Console,
    directory: RunDirectory,
    record: RunRecord,
    first_starter: Starter,
    writer: FileWriter,
    signals: SignalSource,
) -> Outcome:
    """Run this node's workers in the rounds that the nodes agree on. Raises DlaunchError where it cannot take part."""
    rendezvous = spec.rendezvous
    assert rendezvous
    server = None
    try:
        address = local_address(rendezvous.endpoints, rendezvous.local_addr)
        server = _start_server(rendezvous, directory.path)
        loop = NodeLoop(
            spec,
            settings.local_world_size,
            console,
            lambda peers_at: Coupling(
                NodeMachine(settings), _member(spec, rendezvous, settings, peers_at, lingers=server is not None)
            ),
            directory,
            record,
            first_starter,
            writer,
            address=address,
            open_store=lambda deliver: _open_store(rendezvous, deliver),
            spared=(server.keeper_pid,) if server else (),
        )
    except BaseException:
        first_starter.dismiss()
        if server:
            server.stop()
        raise
    try:
        return loop.run(signals)
    finally:
        if server:
            server.stop()


def _start_server(rendezvous: RendezvousSpec, log_directory: Path | None) -> EtcdServer | None:
    """The private etcd of a run without one, where this node is the one to run it."""
    if not rendezvous.embedded:
        return None
    host, port = host_and_port(rendezvous.endpoints[0])
    is_host = owns_endpoint(host) if rendezvous.is_host is None else rendezvous.is_host
    server = EtcdServer.start(host, port, log_directory) if is_host else None
    if server is None or isinstance(server, AlreadyServed):
        return None
    try:
        another_serves = server.settled(SERVER_S) is EtcdState.ALREADY_SERVED
    except BaseException:
        server.stop()
        raise
    if another_serves:
        server.stop()
        return None
    return server


def _open_store(rendezvous: RendezvousSpec, deliver: Deliver) -> Store:
    from dlaunch.rendezvous.etcd import EtcdStore  # noqa: PLC0415  -- gRPC, of which a run on one node knows nothing

    settings = EtcdSettings(
        endpoints=rendezvous.endpoints,
        ca=str(rendezvous.ca_file or ""),
        cert=str(rendezvous.cert_file or ""),
        key=str(rendezvous.key_file or ""),
        user=rendezvous.user or "",
        password=password_of(rendezvous) or "",
        tls=rendezvous.https,
    )
    return EtcdStore(settings, deliver)


def _member(spec: JobSpec, rendezvous: RendezvousSpec, settings: Settings, peers_at: str, *, lingers: bool) -> Member:
    restart = spec.restart
    run = RunSettings(
        min_nodes=rendezvous.min_nodes,
        max_nodes=rendezvous.max_nodes,
        max_restarts=restart.max_restarts,
        restart_window_s=restart.window_s,
        backoff_s=restart.backoff_s,
        backoff_max_s=restart.backoff_max_s,
        early_stop=restart.early_stop,
        join=Join(rendezvous.join.value),
        join_settle_s=rendezvous.join_settle_s,
        settle_s=rendezvous.settle_s,
        lease_ttl_s=rendezvous.lease_ttl_s,
        outage_limit_s=rendezvous.outage_limit_s,
        max_node_failures=rendezvous.max_node_failures,
        cool_down_s=rendezvous.cool_down_s,
    )
    node = NodeInfo(
        host=settings.node,
        boot_id=_boot_id(),
        address=peers_at,
        local_world_size=settings.local_world_size,
        role=spec.role,
        node_rank=rendezvous.node_rank,
    )
    connect_s = rendezvous.timeout_s if rendezvous.embedded else CONNECT_S
    member = MemberSettings(
        spec.run_id, run, rendezvous.key_prefix, rendezvous.timeout_s, min(connect_s, rendezvous.timeout_s), lingers
    )
    return Member(member, node, lambda: os.urandom(8).hex())


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
