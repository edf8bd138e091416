"""A simulated node: clocks, frozen hosts, deadlines, and when an address refuses."""

from __future__ import annotations

import pytest

from dlaunch.outcome import RunState
from dlaunch.simulation.brain import make_brain
from dlaunch.simulation.clock import HostClock, Scheduler
from dlaunch.simulation.cluster import Cluster
from dlaunch.simulation.faults import Fault, Kind
from dlaunch.simulation.plan import SETTINGS, HostPlan, Plan


def running(*faults: Fault, hosts: int = 2, until: float = 4.0) -> Cluster:
    """A cluster whose workers run."""
    plan = Plan(
        1, tuple(HostPlan(0.1 * n) for n in range(hosts)), SETTINGS, faults=faults, needed_s=100.0, heals_at=1e6
    )
    cluster = Cluster(plan, make_brain)
    cluster.arrange()
    go_on(cluster, until)
    assert len(cluster.invariants.alive()) == 2 * hosts
    return cluster


def go_on(cluster: Cluster, until: float) -> None:
    while cluster.scheduler.step(until):
        pass


def test_things_happen_in_the_order_of_time_and_not_when_they_are_cancelled() -> None:
    scheduler, seen = Scheduler(), list[str]()
    scheduler.at(2.0, seen.append, "c")
    scheduler.at(1.0, seen.append, "a")
    scheduler.at(1.0, seen.append, "b")
    scheduler.after(1.5, seen.append, "x").cancel()
    while scheduler.step(3.0):
        pass
    assert seen == ["a", "b", "c"]
    assert scheduler.now == 3.0


def test_a_host_clock_has_its_own_start_and_rate() -> None:
    clock = HostClock(500.0, 1.0001)
    assert clock.shows(10.0) == pytest.approx(510.001)
    assert clock.true(clock.shows(123.456)) == pytest.approx(123.456)


def test_the_starter_kills_at_the_deadline_although_the_agent_is_frozen() -> None:
    cluster = running()
    host = cluster.hosts[0]
    assert host.agent is not None
    assert host.agent.starter is not None
    host.agent.freeze()
    starter = host.agent.starter
    deadline = host.clock.true(starter.deadline)
    go_on(cluster, deadline - 0.001)
    assert starter.workers
    go_on(cluster, deadline + 0.001)
    assert not starter.workers


def test_the_workers_of_a_frozen_host_neither_run_nor_end_and_are_killed_when_it_wakes_too_late() -> None:
    cluster = running()
    host = cluster.hosts[0]
    assert host.agent is not None
    assert host.agent.starter is not None
    host.freeze()
    go_on(cluster, 60.0)
    assert len(host.agent.starter.workers) == 2
    host.thaw()
    go_on(cluster, 60.03)
    assert not host.agent.starter.workers


def test_an_address_refuses_only_when_nothing_is_left_of_its_agent() -> None:
    cluster = running()
    agent = cluster.hosts[0].agent
    assert agent is not None
    agent.crash()
    starter = agent.starter
    assert starter is not None
    assert starter.workers
    assert not agent.is_buried()
    go_on(cluster, cluster.scheduler.now + cluster.weather.death.most)
    assert agent.is_buried()
    assert not starter.workers


def test_power_that_fails_says_nothing_until_the_host_is_back() -> None:
    cluster = running()
    host = cluster.hosts[0]
    agent = host.agent
    assert agent is not None
    host.lose_power()
    assert not agent.has_kernel()
    assert len(cluster.invariants.alive()) == 2
    host.get_power()
    assert agent.has_kernel()
    assert agent.is_buried()
    assert host.shows() < 10.0  # its clock began anew


def test_the_job_is_done_when_a_whole_world_has_trained_for_long_enough() -> None:
    plan = Plan(1, (HostPlan(), HostPlan(0.1)), SETTINGS._replace(max_nodes=2), needed_s=7.0)
    result = Cluster(plan, make_brain).run()
    assert result.violation is None
    assert result.ending is not None
    assert result.ending.state is RunState.SUCCEEDED
    assert result.worlds[0].at + 7.0 < result.ended_at < result.worlds[0].at + 8.0


def test_a_fault_that_ends_training_loses_what_was_not_saved() -> None:
    fault = Fault(4.0, Kind.WORKER_FAILS, 0, hard=True)
    cluster = running(fault, until=3.9)
    go_on(cluster, 8.0)
    first, second = cluster.job.whole
    assert first.round + 1 == second.round
    assert 0.0 < cluster.job.done_s < 4.0 - first.at
