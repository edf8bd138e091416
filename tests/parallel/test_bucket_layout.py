"""Buckets as tables: which parameters lie together, and in which order buckets are reduced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlaunch.parallel.ddp.bucket_layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, MIB, Slot, bucket_caps, lay_out


def slots(*sizes: int, kinds: str = "", sparse: tuple[int, ...] = ()) -> list[Slot]:
    return [Slot(size, kinds[i : i + 1] or "a", i in sparse) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("given_slots", "order", "caps", "expected"),
    [
        (slots(4, 4, 4), [2, 1, 0], [100], ((2, 1, 0),)),
        (slots(4, 4, 4, 4), [3, 2, 1, 0], [4, 100], ((3,), (2, 1, 0))),  # a small first bucket
        (slots(4, 4, 4, 4), [3, 2, 1, 0], [4, 8], ((3,), (2, 1), (0,))),  # the last cap holds on
        (slots(200, 4), [1, 0], [100], ((1, 0),)),  # a slot larger than the cap fills its bucket
        (slots(4, 4, 4, 4, kinds="abab"), [3, 2, 1, 0], [100], ((3, 1), (2, 0))),  # one open bucket for each kind
        (slots(4, 4, 4, sparse=(1,)), [2, 1, 0], [100], ((1,), (2, 0))),  # by the last slot to become ready
        (slots(0, 0), [1, 0], [100], ((1, 0),)),
        (slots(), [], [100], ()),
    ],
)
def test_buckets_are_not_what_the_table_says(
    given_slots: list[Slot], order: list[int], caps: list[int], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert lay_out(given_slots, order, caps) == expected


def test_caps_are_a_small_first_bucket_and_25_mib_unless_said_otherwise() -> None:
    assert bucket_caps() == [FIRST_BUCKET_BYTES, BUCKET_BYTES] == [MIB, 25 * MIB]
    assert bucket_caps(2) == [2 * MIB]
    assert bucket_caps(None, [1, 3.5]) == [MIB, int(3.5 * MIB)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab"), st.booleans()), max_size=30).flatmap(
        lambda items: st.tuples(st.just(items), st.permutations(range(len(items))))
    ),
    st.lists(st.integers(1, 80), min_size=1, max_size=3),
)
def test_a_layout_loses_doubles_or_mixes_a_parameter(
    case: tuple[list[tuple[int, str, bool]], list[int]], caps: list[int]
) -> None:
    items, order = case
    given_slots = [Slot(*item) for item in items]
    layout = lay_out(given_slots, order, caps)
    assert sorted(index for bucket in layout for index in bucket) == list(range(len(items)))
    place = {index: position for position, index in enumerate(order)}
    assert [place[bucket[-1]] for bucket in layout] == sorted(place[bucket[-1]] for bucket in layout)
    for bucket in layout:
        assert len({given_slots[index].kind for index in bucket}) == 1
        assert len(bucket) == 1 or not any(given_slots[index].sparse for index in bucket)
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)
