"""The small values that the agreement and the node that takes part in it hand to each other."""

from __future__ import annotations

from typing import NamedTuple

from dlaunch.outcome import Failure, RunState


class Peer(NamedTuple):
    """Another agent, and where it listens for its peers."""

    node_id: str  # new for every agent process, and never used twice
    address: str  # host:port, an IPv6 host in brackets


class Assignment(NamedTuple):
    """A node's place in the world of one round."""

    round: int
    restart_count: int  # of the whole job
    group_rank: int
    group_world_size: int
    base_rank: int  # the rank of its local rank 0
    world_size: int
    local_world_size: int
    role_base_rank: int
    role_world_size: int
    meeting_address: str  # where the workers meet: the store that group rank 0 opened for this round
    meeting_port: int
    meeting_served: bool  # by the agent of group rank 0; else rank 0 serves it
    successor: Peer | None  # next in the order of group ranks; None for a node alone
    first: Peer  # group rank 0
    members: tuple[Peer, ...] = ()  # all, in the order of group ranks; only group rank 0 is told


class Ending(NamedTuple):
    """How the run ended: the same on every node."""

    state: RunState
    exit_code: int
    reason: str
    restarts_used: int
    failure: Failure | None = None  # the root cause, where the run failed by one
