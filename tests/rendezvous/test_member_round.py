"""What a member does, and what it does once only, while `round` moves under it."""

from __future__ import annotations

from dlaunch.rendezvous import effects, events
from dlaunch.rendezvous.records import Phase, RunSettings, write_round
from dlaunch.rendezvous.store import Range, Request, RevokeLease, StoreError, Trouble, Txn

from .member_world import Node, World

NOT_SENT = StoreError(Trouble.UNREACHABLE, "etcd cannot be reached.")
NONCE = "another"


def test_workers_that_finish_when_the_next_round_forms_already_say_nothing_of_that_round() -> None:
    world = World(RunSettings(2, 2, settle_s=0.1))
    slow, other = world.running()
    slow.stopping_takes_s = 10
    world.put(world.keys.round, write_round(world.round._replace(number=2, phase=Phase.FORMING, nonce="")))
    world.until(lambda: not other.running)
    assert slow.running == 1
    slow.finish()
    world.until(lambda: slow.running == other.running == 2)
    told = {kv.key.rpartition("/")[2] for kv in world.read(world.keys.reports(2), prefix=True)}
    assert told == {"ready"}


def test_an_assignment_is_read_once_however_often_the_round_is_looked_at() -> None:
    world, spare = a_spare()
    move_twice(world)
    world.run_for(1)
    assert reads(world, spare) == 1


def test_a_read_of_an_assignment_that_failed_is_repeated_after_a_pause() -> None:
    world, spare = a_spare()
    spare.refuses = lambda request: NOT_SENT if is_read(world, spare, request) and reads(world, spare) < 2 else None
    move_twice(world)
    world.until(lambda: reads(world, spare) == 2, within_s=1)
    world.run_for(1)
    assert reads(world, spare) == 2


def test_a_node_that_gets_ready_late_once_is_taken_in() -> None:
    world, late = with_a_late_node()
    late.getting_ready_takes_s = 0.001
    world.until(lambda: late.running == 2)
    world.run_for(60)
    assert world.round.number == 2


def test_a_node_that_gets_ready_late_each_time_restarts_the_job_once() -> None:
    world, late = with_a_late_node()
    world.run_for(300)
    assert (world.round.number, world.round.phase, late.running) == (2, Phase.RUNNING, 0)


def test_a_node_that_is_asked_to_leave_while_it_ends_has_left() -> None:
    world = World(RunSettings(2, 2, settle_s=0.1))
    node, other = world.running(2)
    for one in world.nodes:
        one.finish()
    world.until(lambda: any(isinstance(request, RevokeLease) for request in node.asked))
    node.handle(events.PeerGone(other.member.node_id))  # what it has to tell of that keeps it from leaving at once
    node.handle(events.Leave("the user wants it"))
    world.until(lambda: node.has_ended)
    assert node.ended == effects.Left()


def with_a_late_node() -> tuple[World, Node]:
    """A round of one node runs; the other, which needs longer than a round waits, is not ready yet."""
    world = World(RunSettings(1, 2, settle_s=0.1))
    (late,) = world.join(1)
    late.getting_ready_takes_s = 8
    (other,) = world.join(1)
    world.until(lambda: other.running == 1)
    assert world.round.passed == (late.member.node_id,)
    return world, late


def a_spare() -> tuple[World, Node]:
    """A node that waits while the job runs without it."""
    world = World(RunSettings(1, 1, settle_s=0.1))
    world.running(1)
    (spare,) = world.join(1)
    world.until(lambda: bool(spare.said))
    return world, spare


def move_twice(world: World) -> None:
    """The round has other assignments, and is written again before anybody can have read them."""
    record = world.round._replace(nonce=NONCE)
    for _ in range(2):
        world.put(world.keys.round, write_round(record))


def reads(world: World, node: Node) -> int:
    """How often a node has asked for its assignment."""
    return sum(is_read(world, node, request) for request in node.asked)


def is_read(world: World, node: Node, request: Request) -> bool:
    wanted = Range(world.keys.assign(NONCE, node.member.node_id))
    return isinstance(request, Txn) and wanted in request.success
