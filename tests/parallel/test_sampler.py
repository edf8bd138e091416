"""The elastic sampler: every sample of an epoch exactly once, whatever happens to the world on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dlaunch.parallel.data.sampler import ElasticDistributedSampler


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(sampler: ElasticDistributedSampler, batch_size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler, **options)  # type: ignore[arg-type]


def train(
    samplers: list[ElasticDistributedSampler], batch_size: int, steps: int | None, **options: Any
) -> list[list[int]]:
    """Run all ranks step by step; one list of samples for each step (order: rank by rank)."""
    iterators = [iter(sampler.batches(loader_of(sampler, batch_size, **options))) for sampler in samplers]
    delivered = []
    for _ in range(samplers[0].steps(batch_size) if steps is None else steps):
        step: list[int] = []
        for iterator in iterators:
            step += next(iterator, torch.tensor([], dtype=torch.int64)).tolist()
        delivered.append(step)
    if steps is None:
        assert all(next(iterator, None) is None for iterator in iterators)
    return delivered


def world(size: int, world_size: int, **options: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(Numbers(size), world_size, rank, **options) for rank in range(world_size)]


def order(size: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    alone = ElasticDistributedSampler(Numbers(size), 1, 0, shuffle=shuffle, seed=seed)
    alone.set_epoch(epoch)
    return list(alone)


@settings(deadline=None, max_examples=150)
@given(
    size=st.integers(1, 80),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    lives=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4)), max_size=4),
    last=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    in_place=st.booleans(),
)
def test_an_epoch_is_delivered_once_and_in_order_through_several_changes_of_the_world(
    size: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    lives: list[tuple[int, int, int]],
    last: tuple[int, int],
    in_place: bool,
) -> None:
    samplers = world(size, lives[0][0] if lives else last[0], shuffle=shuffle, seed=seed)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    expected = order(size, seed, epoch, shuffle)
    delivered: list[list[int]] = []

    def change_to(world_size: int) -> list[ElasticDistributedSampler]:
        state = samplers[0].state_dict()
        new = world(size, world_size, shuffle=shuffle, seed=seed)
        for rank, sampler in enumerate(new):
            sampler.load_state_dict(state)
            if in_place and rank < len(samplers):
                samplers[rank].set_world(world_size, rank)
                new[rank] = samplers[rank]
        return new

    for world_size, batch_size, steps in lives:
        samplers = change_to(world_size)
        # An epoch that ends here would be begun again by samplers that stay in their process.
        delivered += train(samplers, batch_size, min(steps, max(0, samplers[0].steps(batch_size) - 1)))
    samplers = change_to(last[0])
    delivered += train(samplers, last[1], None)

    at = 0
    for step in delivered:
        assert sorted(step) == sorted(expected[at : at + len(step)])
        at += len(step)
    assert at == size
    assert samplers[0].position == size


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    world_size=st.integers(1, 6),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_with_padding_or_dropping_it_gives_what_torchs_sampler_gives(
    size: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(world_size):
        theirs: DistributedSampler[int] = DistributedSampler(
            Numbers(size), world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        ours = ElasticDistributedSampler(
            Numbers(size), world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last, pad=not drop_last
        )
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_counts_batches_that_were_trained_on_not_those_that_workers_drew_ahead(workers: int) -> None:
    samplers = world(64, 2)
    delivered = train(samplers, 4, 3, num_workers=workers, prefetch_factor=4 if workers else None)
    assert samplers[0].position == samplers[1].position == 3 * 2 * 4
    resumed = world(64, 2)
    for sampler in resumed:
        sampler.load_state_dict(samplers[0].state_dict())
    delivered += train(resumed, 4, None, num_workers=workers)
    assert sorted(number for step in delivered for number in step) == list(range(64))


def test_an_epoch_that_was_complete_yields_nothing_after_a_restart_and_the_next_one_begins_at_its_start() -> None:
    before = world(10, 1)[0]
    train([before], 5, None)
    after = world(10, 1)[0]
    after.load_state_dict(before.state_dict())
    assert list(after) == []
    after.set_epoch(after.epoch + 1)
    assert sorted(after) == list(range(10))


def test_an_epoch_may_be_repeated_without_set_epoch_as_with_torchs_sampler() -> None:
    sampler = world(10, 1)[0]
    first, second = train([sampler], 5, None), train([sampler], 5, None)
    assert first == second


def test_without_advance_it_is_a_plain_sampler_that_starts_over() -> None:
    sampler = world(10, 2)[0]
    assert list(sampler) == list(sampler)
    assert sampler.position == 0


def test_the_length_does_not_change_while_an_epoch_is_iterated() -> None:
    sampler = world(12, 2)[0]
    loader = loader_of(sampler, 2)
    assert [len(loader) for _ in sampler.batches(loader)] == [3, 3, 3]
    assert len(loader) == 3


def test_a_loader_that_drops_its_last_batch_ends_the_epoch() -> None:
    sampler = world(10, 1)[0]
    batches = list(sampler.batches(loader_of(sampler, 4, drop_last=True)))
    assert len(batches) == 2
    assert sampler.position == 10


def test_the_steps_of_a_whole_epoch_are_known_after_a_restart_in_its_middle() -> None:
    sampler = world(20, 2)[0]
    whole = sampler.steps(3)
    sampler.load_state_dict({**sampler.state_dict(), "position": 12})
    assert sampler.steps(3) == 2
    assert sampler.steps(3, whole_epoch=True) == whole == 4


def test_the_seed_of_the_state_wins_over_that_of_the_constructor() -> None:
    before = world(30, 1, seed=7)[0]
    after = world(30, 1, seed=8)[0]
    after.load_state_dict(before.state_dict())
    assert list(after) == order(30, 7, 0, shuffle=True)


@pytest.mark.parametrize(("change", "name"), [({"dataset_size": 9}, "dataset_size"), ({"shuffle": False}, "shuffle")])
def test_a_state_of_another_dataset_in_mid_epoch_is_refused(change: dict[str, Any], name: str) -> None:
    sampler = world(10, 1)[0]
    state = {**sampler.state_dict(), "position": 4, **change}
    with pytest.raises(ValueError, match=name):
        sampler.load_state_dict(state)
    sampler.load_state_dict({**state, "position": 0})


def test_misuse_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        ElasticDistributedSampler(Numbers(4), 1, 0, drop_last=True, pad=True)
    with pytest.raises(ValueError, match="Invalid rank 3"):
        ElasticDistributedSampler(Numbers(4), 2, 3)
    sampler = world(4, 1)[0]
    with pytest.raises(ValueError, match="sampler=<this sampler>"):
        sampler.batches(DataLoader(Numbers(4)))
    with pytest.raises(ValueError, match="no batch_size"):
        sampler.batches(DataLoader(Numbers(4), batch_size=None, sampler=sampler))
    with pytest.raises(ValueError, match="version 99"):
        sampler.load_state_dict({**sampler.state_dict(), "version": 99})


def test_the_place_comes_from_the_launchers_variables_before_a_process_group_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = ElasticDistributedSampler(Numbers(9), shuffle=False)
    assert list(sampler) == [2, 5, 8]


def test_torchdatas_stateful_loader_resumes_exactly_in_a_world_of_the_same_size() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        sampler = ElasticDistributedSampler(Numbers(40), 2, 1)
        whole = [batch.tolist() for batch in loader_of(sampler, 4)]
        loader = stateful.StatefulDataLoader(Numbers(40), batch_size=4, sampler=sampler, num_workers=workers)
        iterator = iter(loader)
        first = [next(iterator).tolist() for _ in range(2)]
        state = loader.state_dict()
        again = ElasticDistributedSampler(Numbers(40), 2, 1)
        loader = stateful.StatefulDataLoader(Numbers(40), batch_size=4, sampler=again, num_workers=workers)
        loader.load_state_dict(state)
        assert first + [batch.tolist() for batch in loader] == whole
