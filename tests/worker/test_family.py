"""Reading /proc: names that hold anything, and who descends from whom."""

from __future__ import annotations

import pytest

from dlaunch.worker.family import Relative, below, parse_stat


@pytest.mark.parametrize(
    ("line", "relative"),
    [
        (b"7 (python) S 1 7 7 0 -1 4194560", Relative(7, 1, 7, "python", gone=False)),
        (b"8 (a) b) (c d) R 7 8 9 0", Relative(8, 7, 9, "a) b) (c d", gone=False)),
        (b"9 (\n) Z 7 8 9 0", Relative(9, 7, 9, "\n", gone=True)),
        (b"10 (\xff) X 7 8 9 0", Relative(10, 7, 9, "\ufffd", gone=True)),
        (b"11 () D 7 8 9 0", Relative(11, 7, 9, "", gone=False)),
    ],
)
def test_a_line_of_stat_is_read_whatever_the_name_holds(line: bytes, relative: Relative) -> None:
    assert parse_stat(line) == relative


def tree(*edges: tuple[int, int]) -> list[Relative]:
    return [Relative(pid, parent, pid, "p", gone=False) for pid, parent in edges]


@pytest.mark.parametrize(
    ("population", "found"),
    [
        (tree(), []),
        (tree((2, 1), (3, 1)), []),
        (tree((11, 10), (12, 11), (13, 11), (14, 99), (15, 12)), [11, 12, 13, 15]),
        (tree((10, 11), (11, 10)), [11, 10]),  # read while numbers were reused: it must end
    ],
)
def test_descendants_are_found_at_any_depth(population: list[Relative], found: list[int]) -> None:
    assert sorted(relative.pid for relative in below(10, population)) == sorted(found)
