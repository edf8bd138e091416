"""A sweep as a pure machine: who gets which signal at which moment."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from dlaunch.worker.family import Relative
from dlaunch.worker.sweep import NATURAL_END_S, TIDY_S, Signal, Sweep


def alive(*pids: int) -> list[Relative]:
    return [Relative(pid, 1, pid, f"name {pid}", gone=False) for pid in pids]


def test_a_hard_sweep_kills_at_once_and_again_what_is_new() -> None:
    sweep = Sweep(0.0, started_at=100.0)
    assert sweep.step(100.0, alive(5, 6), ()) == [Signal(5, SIGKILL), Signal(6, SIGKILL)]
    assert sweep.step(100.0, alive(6, 7), ()) == [Signal(6, SIGKILL), Signal(7, SIGKILL)]
    assert sweep.killed == {5: "name 5", 6: "name 6", 7: "name 7"}


def test_a_gentle_sweep_waits_then_asks_once_then_kills() -> None:
    sweep = Sweep(3.0, started_at=100.0)
    ask_at = 100.0 + NATURAL_END_S
    assert sweep.step(100.0, alive(5, 6), ()) == []
    assert sweep.step(ask_at, alive(5), ()) == [Signal(5, SIGTERM)]
    assert sweep.step(ask_at + 1, alive(5, 8), ()) == [Signal(8, SIGTERM)]
    assert sweep.step(ask_at + 2, alive(5, 8), ()) == []
    assert sweep.step(ask_at + 3, alive(5), ()) == [Signal(5, SIGKILL)]
    assert sweep.killed == {5: "name 5", 8: "name 8"}


def test_a_look_that_comes_late_skips_no_stage_and_kills() -> None:
    sweep = Sweep(3.0, started_at=100.0)
    assert sweep.step(1000.0, alive(5), ()) == [Signal(5, SIGKILL)]


def test_what_cleans_up_after_others_gets_time_once_the_others_are_dead() -> None:
    sweep = Sweep(0.0, started_at=100.0)
    assert sweep.step(105.0, alive(5, 9), {9}) == [Signal(5, SIGKILL)]
    assert sweep.step(106.0, alive(9), {9}) == []
    assert sweep.step(106.0 + TIDY_S / 2, alive(9), {9}) == []
    assert sweep.step(106.0 + TIDY_S, alive(9), {9}) == [Signal(9, SIGKILL)]
    assert sweep.killed == {5: "name 5", 9: "name 9"}


def test_a_hurried_sweep_gives_no_more_time_but_for_tidying() -> None:
    sweep = Sweep(1000.0, started_at=100.0)
    sweep.hurry()
    assert sweep.step(100.0, alive(5, 9), {9}) == [Signal(5, SIGKILL)]
    assert sweep.step(100.0, alive(9), {9}) == []


def test_processes_of_our_own_are_killed_but_not_held_against_the_workers() -> None:
    sweep = Sweep(0.0, started_at=100.0, ours=[5])
    assert sweep.step(100.0, alive(5, 6), ()) == [Signal(5, SIGKILL), Signal(6, SIGKILL)]
    assert sweep.killed == {6: "name 6"}


def test_the_starter_is_killed_last() -> None:
    sweep = Sweep(0.0, started_at=100.0, last=[2])
    assert sweep.step(100.0, alive(2, 5, 9), {9}) == [Signal(5, SIGKILL)]
    assert sweep.step(100.0, alive(2, 9), {9}) == []
    assert sweep.step(100.0 + TIDY_S, alive(2, 9), {9}) == [Signal(9, SIGKILL)]
    assert sweep.step(100.0 + TIDY_S, alive(2), ()) == [Signal(2, SIGKILL)]
