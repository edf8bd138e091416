"""What is queued for a slow reader comes out again: all of it, in order, and without filling the memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlaunch.agent.console import Stream
from dlaunch.launcher import spool as module
from dlaunch.launcher.spool import Spool

STREAMS: st.SearchStrategy[Stream] = st.sampled_from(["stdout", "stderr"])
PUTS = st.tuples(STREAMS, st.binary(max_size=40))
STEPS = st.lists(PUTS | st.integers(1, 60), max_size=60)


def per_byte(blocks: list[tuple[Stream, bytes]]) -> list[tuple[Stream, int]]:
    return [(stream, byte) for stream, data in blocks for byte in data]


def rest_of(spool: Spool, most: int) -> list[tuple[Stream, bytes]]:
    blocks = []
    while (block := spool.take(most)) is not None:
        assert 0 < len(block[1]) <= most
        blocks.append(block)
    return blocks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(steps=STEPS, memory=st.integers(0, 100), segment=st.integers(1, 80), most=st.integers(1, 200))
def test_what_comes_out_is_what_went_in_in_the_same_order(
    steps: list[tuple[Stream, bytes] | int], memory: int, segment: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", segment)
    spool = Spool(memory)
    went_in, came_out = [], []
    for step in steps:
        if isinstance(step, int):
            came_out += [block] if (block := spool.take(step)) is not None else []
        else:
            assert spool.put(*step)
            went_in.append(step)
        assert len(spool) == len(per_byte(went_in)) - len(per_byte(came_out))
        assert bool(spool) == bool(len(spool))
    came_out += rest_of(spool, most)
    assert per_byte(came_out) == per_byte(went_in)


def test_a_first_block_that_has_no_room_in_front_is_there_at_once() -> None:
    spool = Spool(memory_bytes=1)
    spool.put("stdout", b"x")
    assert spool.take(100) == ("stdout", b"x")


def test_blocks_of_one_stream_are_taken_together() -> None:
    spool = Spool()
    for stream, data in (("stdout", b"a\n"), ("stdout", b"b\n"), ("stderr", b"c\n"), ("stdout", b"d\n")):
        spool.put(stream, data)  # type: ignore[arg-type]
    assert rest_of(spool, 100) == [("stdout", b"a\nb\n"), ("stderr", b"c\n"), ("stdout", b"d\n")]


def test_what_does_not_fit_into_memory_lies_in_files_without_a_name(tmp_path: Path) -> None:
    spool = Spool(memory_bytes=1 << 20, directory=tmp_path)
    before = open_files(tmp_path)
    for _ in range(100):
        assert spool.put("stdout", b"x" * (1 << 17))
    assert len(spool) == 100 << 17
    assert sum(open_files(tmp_path)) - sum(before) > 11 << 20
    assert list(tmp_path.iterdir()) == []
    assert sum(len(data) for _, data in rest_of(spool, 1 << 18)) == 100 << 17
    assert open_files(tmp_path) == before, "a file that has been read is given back"


def test_disk_space_is_given_back_while_the_reader_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1 << 16)
    spool = Spool(memory_bytes=1 << 12, directory=tmp_path)
    for _ in range(20):
        spool.put("stdout", b"x" * (1 << 14))
    for _ in range(400):
        spool.put("stdout", b"x" * (1 << 14))
        taken = 0
        while taken < 1 << 14:
            block = spool.take((1 << 14) - taken)
            assert block is not None
            taken += len(block[1])
    assert len(spool) == 20 << 14
    assert sum(open_files(tmp_path)) < 45 << 14


def open_files(directory: Path) -> list[int]:
    """The sizes of this process's open files that once had a name in a directory."""
    sizes = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory)):  # noqa: PTH115
                sizes.append(os.fstat(int(fd)).st_size)
        except OSError:
            continue
    return sizes


def test_what_comes_later_does_not_overtake_what_lies_in_a_file() -> None:
    spool = Spool(memory_bytes=100)
    spool.put("stdout", b"x" * 200)
    spool.put("stdout", b"small")
    assert rest_of(spool, 200) == [("stdout", b"x" * 200), ("stdout", b"small")]


def test_a_disk_that_fills_up_in_the_middle_of_a_block_loses_nothing(tmp_path: Path) -> None:
    spool = Spool(memory_bytes=1000, directory=tmp_path)
    blocks = [b"%04d" % i * 100 for i in range(20)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        accepted = [spool.put("stdout", block) for block in blocks]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(accepted)
    assert b"".join(data for _, data in rest_of(spool, 333)) == b"".join(blocks)


def test_without_a_disk_memory_is_used_and_then_blocks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EMERGENCY_BYTES", 1000)
    spool = Spool(memory_bytes=100, directory=tmp_path / "missing")
    accepted = [spool.put("stdout", b"%03d." % i) for i in range(400)]
    assert accepted.index(False) * 4 == 72 + 1000
    assert not any(accepted[accepted.index(False) :])
    assert b"".join(data for _, data in rest_of(spool, 50)) == b"".join(b"%03d." % i for i in range(268))
    assert spool.put("stdout", b"again")


def test_what_is_cleared_is_gone() -> None:
    spool = Spool(memory_bytes=10)
    for _ in range(20):
        spool.put("stderr", b"twelve bytes")
    spool.clear()
    assert len(spool) == 0
    assert spool.take(10) is None
