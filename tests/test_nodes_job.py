"""The judge of two worlds at once (nodes_job.py): it finds them, and only them."""

from __future__ import annotations

from tests.nodes_job import Life, overlaps


def life(world: str, *ticks: float, rank: int = 0) -> Life:
    told = {"MASTER_ADDR": world, "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    return Life(1, "host", rank, 2, told, ticks[0], ticks, ())


def test_worlds_one_after_the_other_do_not_overlap() -> None:
    assert overlaps([life("one", 1.0, 2.0), life("one", 1.1, 2.1, rank=1), life("two", 2.2, 3.0)]) == []


def test_a_worker_that_outlives_the_beginning_of_the_next_world_is_found() -> None:
    stays = life("one", 1.0, 2.0, 2.5, rank=1)
    (found,) = overlaps([life("one", 1.0, 2.0), stays, life("two", 2.2, 3.0, rank=1), life("two", 2.1, 3.0)])
    assert (found.earlier, found.at, found.seconds) == (stays, 2.5, 0.0)
    assert found.later.begun_at == 2.1


def test_a_world_is_compared_with_all_that_come_after_it() -> None:
    lives = [life("one", 1.0, 5.0), life("two", 2.0, 2.5), life("three", 4.0, 4.5)]
    assert [(pair.earlier.world, pair.later.world) for pair in overlaps(lives)] == [
        ("one:1", "two:1"),
        ("one:1", "three:1"),
    ]


def test_the_time_for_which_a_worker_stood_still_does_not_count() -> None:
    (found,) = overlaps([life("one", 1.0, 2.0, 9.0, 9.1), life("two", 5.0, 10.0)])
    assert (found.at, round(found.seconds, 3)) == (9.0, 0.1)
