"""The script's loader with one rank's share: every argument kept, every rank as many batches, each epoch anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dlaunch.errors import UsageError
from dlaunch.parallel.data.sampler import ElasticDistributedSampler
from dlaunch.parallel.data.streaming import ElasticStream
from dlaunch.parallel.scripts.prepared_loader import prepared_loader, seed_of

CPU = torch.device("cpu")


def loader_of(size: int, **arguments: Any) -> Any:
    dataset: Any = range(size)
    return DataLoader(dataset, **arguments)


def shares(loader: DataLoader[Any], world_size: int = 2, seed: int = 5) -> list[DataLoader[Any]]:
    return [
        prepared_loader(loader, rank=rank, world_size=world_size, seed=seed, device=CPU) for rank in range(world_size)
    ]


def epoch(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [item for batch in batches for item in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_has_as_many_batches_and_together_they_are_the_dataset(
    world_size: int, drop_last: bool, shuffle: bool
) -> None:
    loader: Any = loader_of(23, batch_size=2, shuffle=shuffle, drop_last=drop_last)
    epochs = [epoch(share) for share in shares(loader, world_size)]
    assert {len(batches) for batches in epochs} == {len(share) for share in shares(loader, world_size)}
    seen = [item for batches in epochs for item in flat(batches)]
    if drop_last:
        assert len(seen) == len(set(seen)) and len(seen) > 23 - 2 * world_size - world_size
    else:
        assert set(seen) == set(range(23)) and len(seen) < 23 + world_size
    assert (sorted(flat(epochs[0])) != flat(epochs[0])) is shuffle


def test_a_shuffling_loader_has_another_order_each_epoch_and_the_same_on_all_ranks() -> None:
    first, second = shares(loader_of(20, batch_size=4, shuffle=True))
    orders = [sorted(flat(epoch(first)) + flat(epoch(second))) for _ in range(2)]
    assert orders == [list(range(20))] * 2  # disjoint: both drew the same permutation, in both epochs
    assert epoch(first) != epoch(first)


def test_a_script_that_sets_the_epoch_itself_gets_that_epoch() -> None:
    plain, setting = (shares(loader_of(20, shuffle=True), 1)[0] for _ in range(2))
    expected = [epoch(plain) for _ in range(4)]
    sampler: Any = setting.sampler
    sampler.set_epoch(2)
    assert epoch(setting) == expected[2]
    sampler.set_epoch(3)
    assert epoch(setting) == expected[3]


def identity(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker


def test_every_argument_is_kept_and_the_given_loader_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    arguments: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": torch.tensor,
        "pin_memory": False,
        "timeout": 30.0,
        "worker_init_fn": identity,
        "multiprocessing_context": "fork",
        "generator": generator,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "in_order": False,
    }
    loader: Any = loader_of(10, shuffle=True, **arguments)
    assert len(list(loader)) == 4
    twin: Any = shares(loader)[0]
    for name, value in arguments.items():
        if name != "multiprocessing_context":
            assert getattr(twin, name) == value, name
    assert twin.multiprocessing_context is loader.multiprocessing_context and twin.dataset is loader.dataset
    assert isinstance(loader.sampler, RandomSampler) and type(loader) is DataLoader
    assert isinstance(twin, DataLoader) and type(twin).__name__ == "DataLoader"
    assert [len(list(twin)) for _ in range(2)] == [2, 2]  # its own persistent workers


class Tagged(DataLoader[Any]):
    """A class with a constructor of its own."""

    def __init__(self, tag: str) -> None:
        super().__init__(range(6), batch_size=2)  # type: ignore[arg-type]
        self.tag = tag

    def __iter__(self) -> Any:
        return ((self.tag, batch.tolist()) for batch in super().__iter__())


def test_a_loader_class_of_the_scripts_own_stays_what_it_is() -> None:
    twin: Any = shares(Tagged("mine"))[1]
    assert isinstance(twin, Tagged) and list(twin) == [("mine", [1, 3]), ("mine", [5])]


class Buckets(Sampler[list[int]]):
    """A batch sampler of the script's own; batches of unlike sizes, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
        return (batches[index] for index in torch.randperm(5))

    def __len__(self) -> int:
        return 5


def test_a_batch_sampler_of_the_scripts_own_is_shared_out_in_whole_batches() -> None:
    first, second = (epoch(share) for share in shares(loader_of(9, batch_sampler=Buckets())))
    assert len(first) == len(second) == 3
    assert {tuple(batch) for batch in first + second} == {(0,), (1, 2), (3, 4, 5), (6,), (7, 8)}


def test_torchs_batch_sampler_is_made_anew_around_the_rank_s_sampler() -> None:
    given = BatchSampler(SequentialSampler(range(10)), 2, True)
    twin: Any = shares(loader_of(10, batch_sampler=given))[1]
    assert isinstance(twin.batch_sampler.sampler, ElasticDistributedSampler) and epoch(twin) == [[1, 3], [5, 7]]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 12, 12),
        RandomSampler(range(12), replacement=True),
        RandomSampler(range(12), num_samples=6),
        [3, 1, 2, 0],
    ],
)
def test_other_samplers_keep_what_they_draw(sampler: Any) -> None:
    first, second = shares(loader_of(12, batch_size=2, sampler=sampler))
    assert len(epoch(first)) == len(epoch(second)) == len(first)
    if isinstance(sampler, list):
        assert [flat(epoch(first)), flat(epoch(second))] == [[3, 2], [1, 0]]


@pytest.mark.parametrize("make", [DistributedSampler, ElasticDistributedSampler])
def test_a_sampler_that_knows_its_rank_is_left_alone(make: Any) -> None:
    sampler = make(range(10), num_replicas=4, rank=3)
    twin: Any = shares(loader_of(10, sampler=sampler))[0]
    assert twin.sampler is sampler
    assert epoch(twin) == epoch(twin)  # its epochs are the script's to set


def test_a_loader_without_batches_is_shared_out_by_samples() -> None:
    first, second = shares(loader_of(6, batch_size=None, shuffle=False))
    assert [list(first), list(second)] == [[0, 2, 4], [1, 3, 5]]


class Stream(IterableDataset[int]):
    """Gives its workers different items, as such datasets must."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, 24, step))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_shared_out_whole_with_and_without_workers(workers: int) -> None:
    loader: Any = DataLoader(Stream(), batch_size=2, num_workers=workers)
    first, second = (epoch(share) for share in shares(loader))
    assert sorted(flat(first) + flat(second)) == list(range(24)) and len(first) == len(second)


def test_an_elastic_stream_is_left_alone() -> None:
    stream = ElasticStream(range(8), 2, num_replicas=2, rank=1)
    twin = shares(DataLoader(stream, batch_size=2))[0]
    assert twin.dataset is stream


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: loader_of(9, sampler=Endless()), "a Endless has no length"),
        (lambda: [1, 2, 3], "not a list"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(loader: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shares(loader())


def test_batches_are_moved_to_the_device_whatever_they_are_made_of() -> None:
    dataset = TensorDataset(torch.arange(4.0), torch.arange(4))

    def collate(rows: Any) -> Any:
        return {"x": torch.stack([row[0] for row in rows]), "rest": [(torch.ones(1), "text")]}

    loader: Any = DataLoader(dataset, batch_size=2, collate_fn=collate)
    meta = torch.device("meta")
    twin = prepared_loader(loader, rank=0, world_size=2, seed=0, device=meta)
    (batch,) = list(twin)
    assert batch["x"].device == meta and batch["rest"][0][0].device == meta and batch["rest"][0][1] == "text"


def test_the_seed_is_the_scripts() -> None:
    assert seed_of(loader_of(3, shuffle=True, generator=torch.Generator().manual_seed(11))) == 11
    before = torch.get_rng_state()
    torch.manual_seed(12)
    assert seed_of(loader_of(3, shuffle=True)) == 12
    torch.set_rng_state(before)
