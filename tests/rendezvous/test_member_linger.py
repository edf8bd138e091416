"""The node on which the store lives and dies ends last: the others have to read the end first."""

from __future__ import annotations

import pytest

from dlaunch.rendezvous import events
from dlaunch.rendezvous.member import LINGER_S
from dlaunch.rendezvous.records import NodeRecord, write_node

from .member_world import Node, World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def host(world: World) -> Node:
    """A node of two that has the store; the workers of both run."""
    others = world.settings
    world.settings = others._replace(lingers=True)
    host = world.add()
    world.settings = others
    host.handle(events.Join())
    world.join(1)
    world.until(lambda: all(node.running for node in world.nodes))
    return host


def test_it_ends_when_the_others_have_gone(world: World, host: Node) -> None:
    other = world.nodes[1]
    other.finish()
    host.finish()
    world.until(lambda: host.has_ended, within_s=1)
    assert other.has_ended


def test_it_waits_for_one_that_has_not_gone(world: World, host: Node) -> None:
    other = world.nodes[1]
    other.finish()
    world.run_for(0.1)
    other.die()
    host.finish()
    registration = world.keys.node(other.member.node_id)
    world.until(lambda: not world.read(registration))
    assert not host.has_ended
    world.until(lambda: host.has_ended, within_s=1)


def test_it_waits_no_longer_than_it_may(world: World, host: Node) -> None:
    world.put(world.keys.node("000-x"), write_node(NodeRecord("000-x", "10.9.9.9:1", "ghost", "boot", 2, "default")))
    for node in world.nodes:
        node.finish()
    world.until(lambda: world.nodes[1].has_ended)
    world.run_for(LINGER_S - 1)
    assert not host.has_ended
    world.until(lambda: host.has_ended, within_s=2)
