"""The code under test: what decides for an agent, the same machine and member that a real agent has."""

from __future__ import annotations

import signal

from dlaunch.agent.coupling import Coupling
from dlaunch.agent.machine import Settings
from dlaunch.agent.node_machine import NodeMachine
from dlaunch.rendezvous.member import Member, MemberSettings, NodeInfo
from dlaunch.spec import RestartPolicy, StartMethod

from .cluster import RUN_ID, Body
from .plan import Plan

GRACE_S = 3.0
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def make_brain(plan: Plan, body: Body) -> Coupling:
    """A node's machine and its member, as `dlaunch run` makes them."""
    machine = NodeMachine(
        Settings(
            local_world_size=body.workers,
            run_id=RUN_ID,
            node=body.host,
            start_method=StartMethod.WARM,
            restart=RestartPolicy(max_restarts=plan.settings.max_restarts),
            grace_s=GRACE_S,
            ending_signals=ENDING_SIGNALS,
        )
    )
    member = Member(
        MemberSettings(RUN_ID, plan.settings, timeout_s=plan.timeout_s, lingers=body.serves_store),
        NodeInfo(body.host, body.boot_id, body.address, body.workers, body.role, body.node_rank),
        body.fresh,
    )
    return Coupling(machine, member)
