"""The elastic stream: the same promises as the sampler's, without a length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dlaunch.parallel.data.streaming import ElasticStream


class Counting:
    """0, 1, 2, ... from the beginning each time; remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.read.append(number)
            yield self.epoch * 1000 + number


class Seekable(Counting):
    """The same, but it can begin anywhere."""

    def starting_at(self, epoch: int, position: int) -> Iterator[int]:
        for number in range(position, self.length):
            self.read.append(number)
            yield epoch * 1000 + number


def world(length: int, world_size: int, batch_size: int, **options: Any) -> list[ElasticStream[int]]:
    return [ElasticStream(Counting(length), batch_size, world_size, rank, **options) for rank in range(world_size)]


def train(streams: list[ElasticStream[int]], steps: int | None, **options: Any) -> list[list[int]]:
    iterators = [s.batches(DataLoader(s, batch_size=s.batch_size, **options)) for s in streams]
    delivered: list[list[int]] = []
    while steps is None or len(delivered) < steps:
        step: list[int] = []
        for iterator in iterators:
            step += next(iterator, torch.tensor([], dtype=torch.int64)).tolist()
        if not step:
            break
        delivered.append(step)
    return delivered


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(0, 60),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_a_stream_is_delivered_once_and_in_order_through_several_changes_of_the_world(
    length: int, lives: list[tuple[int, int, int]]
) -> None:
    delivered: list[list[int]] = []
    state: dict[str, Any] | None = None
    for number, (world_size, batch_size, steps) in enumerate(lives):
        streams = world(length, world_size, batch_size)
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        delivered += train(streams, None if number == len(lives) - 1 else steps)
        state = streams[0].state_dict()
    at = 0
    for step in delivered:
        assert sorted(step) == list(range(at, at + len(step)))
        at += len(step)
    assert at == length


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_neither_change_the_order_nor_repeat_an_item_over_epochs_and_restarts(persistent: bool) -> None:
    streams = world(50, 2, 3)
    loaders = [DataLoader(s, batch_size=3, num_workers=2, persistent_workers=persistent) for s in streams]
    for epoch in range(2):
        for stream in streams:
            stream.set_epoch(epoch)
        batches = [[b.tolist() for b in s.batches(loader)] for s, loader in zip(streams, loaders, strict=True)]
        plain = world(50, 2, 3)
        for stream in plain:
            stream.set_epoch(epoch)
        assert batches == [[b.tolist() for b in s.batches(DataLoader(s, batch_size=3))] for s in plain]
    for stream in streams:
        stream.load_state_dict({**stream.state_dict(), "position": 42, "finished": False})
    rest = [number for s, loader in zip(streams, loaders, strict=True) for b in s.batches(loader) for number in b]
    assert sorted(int(number) for number in rest) == list(range(1042, 1050))


def test_a_source_that_can_seek_is_not_read_from_its_beginning() -> None:
    source = Seekable(1000)
    stream = ElasticStream(source, 5, 1, 0)
    stream.load_state_dict({"version": 1, "epoch": 0, "position": 990, "finished": False})
    assert list(stream) == list(range(990, 1000))
    assert source.read == list(range(990, 1000))


def test_drop_last_leaves_out_a_step_that_is_not_whole_on_every_rank() -> None:
    assert [len(list(stream)) for stream in world(23, 2, 5, drop_last=True)] == [10, 10]
    assert [len(list(stream)) for stream in world(23, 2, 5)] == [12, 11]


def test_a_finished_stream_yields_nothing_after_a_restart_and_starts_over_in_the_same_process() -> None:
    stream = world(10, 1, 5)[0]
    first, second = train([stream], None), train([stream], None)
    assert first == second == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    after = world(10, 1, 5)[0]
    after.load_state_dict(stream.state_dict())
    assert train([after], None) == []
    after.set_epoch(1)
    assert train([after], None) == [[1000, 1001, 1002, 1003, 1004], [1005, 1006, 1007, 1008, 1009]]


def test_a_world_may_change_in_the_same_process() -> None:
    alone = world(20, 1, 5)[0]
    delivered = train([alone], 2)
    other = world(20, 2, 5)[1]
    other.load_state_dict(alone.state_dict())
    alone.set_world(2, 0)
    delivered += train([alone, other], None)
    assert sorted(number for step in delivered for number in step) == list(range(20))


def test_misuse_is_refused_in_one_sentence() -> None:
    stream = world(10, 1, 5)[0]
    with pytest.raises(ValueError, match="Invalid rank"):
        ElasticStream(Counting(3), 1, 2, 2)
    with pytest.raises(ValueError, match="made of this stream"):
        stream.batches(DataLoader(world(10, 1, 5)[0], batch_size=5))
    with pytest.raises(ValueError, match="batch_size is 4"):
        stream.batches(DataLoader(stream, batch_size=4))
    with pytest.raises(ValueError, match="version 9"):
        stream.load_state_dict({**stream.state_dict(), "version": 9})


def test_torchdatas_stateful_loader_resumes_a_stream_exactly_in_a_world_of_the_same_size() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        whole = [batch.tolist() for batch in DataLoader(world(40, 2, 3)[1], batch_size=3)]
        loader = stateful.StatefulDataLoader(world(40, 2, 3)[1], batch_size=3, num_workers=workers)
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(3)]
        state = loader.state_dict()
        loader = stateful.StatefulDataLoader(world(40, 2, 3)[1], batch_size=3, num_workers=workers)
        loader.load_state_dict(state)
        assert first + [batch.tolist() for batch in loader] == whole
