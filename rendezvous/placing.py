"""Who takes part in a round, and with which ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .records import AssignRecord, NodeRecord, ReportRecord
from .values import Assignment, Peer


def in_rank_order(nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Nodes in the order of their group ranks: a wished --node-rank where it is free, else by arrival."""
    by_arrival = sorted(nodes, key=lambda node: node.node_id)
    places: list[NodeRecord | None] = [None] * len(by_arrival)
    rest = []
    for node in by_arrival:
        wish = node.node_rank
        if wish is not None and wish < len(places) and places[wish] is None:
            places[wish] = node
        else:
            rest.append(node)
    fill = iter(rest)
    return [node if node is not None else next(fill) for node in places]


def assign(nodes: Sequence[NodeRecord], ready: Mapping[str, ReportRecord]) -> tuple[AssignRecord, ...]:
    """The assignments of a round, in the order of group ranks; ``nodes`` stand in this order.

    Ranks are contiguous on a node. The workers' store is the one that group rank 0 reported.
    """
    meeting = ready[nodes[0].node_id]
    peers = tuple(Peer(node.node_id, node.address) for node in nodes)
    world_size = sum(node.local_world_size for node in nodes)
    of_role = Counter[str]()
    for node in nodes:
        of_role[node.role] += node.local_world_size
    assigned = []
    base_rank, role_base = 0, Counter[str]()
    for group_rank, node in enumerate(nodes):
        assigned.append(
            AssignRecord(
                node_id=node.node_id,
                host=node.host,
                address=node.address,
                group_rank=group_rank,
                group_world_size=len(nodes),
                base_rank=base_rank,
                world_size=world_size,
                local_world_size=node.local_world_size,
                role_base_rank=role_base[node.role],
                role_world_size=of_role[node.role],
                meeting_address=meeting.meeting_address,
                meeting_port=meeting.meeting_port,
                meeting_served=meeting.meeting_served,
                successor=peers[(group_rank + 1) % len(peers)] if len(peers) > 1 else None,
                first=peers[0],
                members=peers if group_rank == 0 else (),
            )
        )
        base_rank += node.local_world_size
        role_base[node.role] += node.local_world_size
    return tuple(assigned)


def as_assignment(record: AssignRecord, number: int, restart_count: int) -> Assignment:
    """What the node is told of its place."""
    return Assignment(
        round=number,
        restart_count=restart_count,
        group_rank=record.group_rank,
        group_world_size=record.group_world_size,
        base_rank=record.base_rank,
        world_size=record.world_size,
        local_world_size=record.local_world_size,
        role_base_rank=record.role_base_rank,
        role_world_size=record.role_world_size,
        meeting_address=record.meeting_address,
        meeting_port=record.meeting_port,
        meeting_served=record.meeting_served,
        successor=record.successor,
        first=record.first,
        members=record.members,
    )
