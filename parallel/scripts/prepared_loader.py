"""A script's DataLoader for one rank: the same loader with the rank's share of the data, on the rank's device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dlaunch.errors import UsageError

from ..data.sampler import ElasticDistributedSampler
from ..data.streaming import ElasticStream
from ..dp.containers import opened
from .rank_share import RankShare, RankStream

_EPOCHS, _DEVICE, _BEGUN = "_dlaunch_epochs", "_dlaunch_device", "_dlaunch_epoch_begun"


class PreparedLoader(DataLoader[Any]):
    """What the class of a prepared loader has in front of the original's.

    Each pass over it is a new epoch, without ``set_epoch`` (which may be called all the same), and batches come on
    the device that the model is on.
    """

    def __iter__(self) -> Any:
        """One epoch's batches."""
        self._begin_an_epoch()
        batches = super().__iter__()
        device: torch.device = vars(self)[_DEVICE]
        return batches if device.type == "cpu" else _on(device, batches)

    def _begin_an_epoch(self) -> None:
        sampler = vars(self)[_EPOCHS]
        if sampler is None:
            return
        if sampler.epoch == vars(self)[_BEGUN]:
            sampler.set_epoch(sampler.epoch + 1)
        vars(self)[_BEGUN] = sampler.epoch


def prepared_loader(
    loader: DataLoader[Any], *, rank: int, world_size: int, seed: int, device: torch.device
) -> DataLoader[Any]:
    """``loader`` for one rank; the one that was given stays as it is.

    The batch size is each rank's, as with torch's ``DistributedSampler``: the whole world's batch is as many times
    larger. Every rank gets as many batches as the others: with ``drop_last`` what does not divide evenly is left out,
    else some samples are repeated (and an incomplete group at the end of a stream is left out always).

    Args:
        loader: any class of DataLoader, with any arguments; all are kept.
        rank: this process's rank.
        world_size: number of ranks.
        seed: of shuffling; the same on every rank.
        device: where batches are moved to; the CPU leaves them where the loader has them.

    Raises:
        UsageError: not a DataLoader, or its sampler has no length.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare() takes a torch DataLoader, not a {type(loader).__name__}.", "Make one of the data.")
    parts = _parts_for(loader, rank, world_size, seed)
    twin = copy.copy(loader)
    # Not by setattr, which DataLoader refuses for these once it is made.
    vars(twin).update(parts, _iterator=None)
    vars(twin).update({_EPOCHS: _with_epochs(loader, parts), _DEVICE: device, _BEGUN: None})
    original = type(loader)
    twin.__class__ = type(original.__name__, (PreparedLoader, original), {"__module__": original.__module__})
    return twin


def seed_of(loader: DataLoader[Any]) -> int:
    """What the script seeded its shuffling with: its generator's seed, else torch's."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    return int(generator.initial_seed() if generator is not None else torch.initial_seed()) % 2**62


def _parts_for(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """The attributes of a loader to exchange: its dataset, its sampler or its batch sampler."""
    dataset = loader.dataset
    batch_sampler = cast(Any, loader).batch_sampler
    if isinstance(dataset, IterableDataset):
        return {} if isinstance(dataset, ElasticStream) else {"dataset": RankStream(dataset, rank, world_size)}
    if batch_sampler is None:
        return {"sampler": _share(loader.sampler, rank, world_size, seed, loader.drop_last)}
    if type(batch_sampler) is BatchSampler:
        drop_last = batch_sampler.drop_last
        sampler = _share(batch_sampler.sampler, rank, world_size, seed, drop_last)
        return {"sampler": sampler, "batch_sampler": BatchSampler(sampler, batch_sampler.batch_size, drop_last)}
    drop_last = bool(getattr(batch_sampler, "drop_last", False))
    return {"batch_sampler": _share_of_any(batch_sampler, rank, world_size, seed, drop_last)}


def _share(sampler: Any, rank: int, world_size: int, seed: int, drop_last: bool) -> Any:
    whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    if whole or type(sampler) is SequentialSampler:
        return ElasticDistributedSampler(
            sampler.data_source, world_size, rank, whole, seed, drop_last, pad=not drop_last
        )
    return _share_of_any(sampler, rank, world_size, seed, drop_last)


def _share_of_any(sampler: Any, rank: int, world_size: int, seed: int, drop_last: bool) -> Any:
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        return sampler  # it knows of ranks already
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"a {type(sampler).__name__} has no length, so it cannot be shared out evenly.",
            "Give it a __len__, or use torch's DistributedSampler.",
        )
    return RankShare(sampler, rank, world_size, seed, drop_last)


def _with_epochs(loader: DataLoader[Any], parts: dict[str, Any]) -> Any:
    """The sampler whose epochs we count; ``None`` for the script's own, whose epochs the script counts."""
    ours = [part for part in parts.values() if isinstance(part, (ElasticDistributedSampler, RankShare))]
    return ours[0] if ours and ours[0] is not loader.sampler else None


def _on(device: torch.device, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield _moved(batch, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.is_pinned())
    if callable(move := getattr(value, "to", None)):  # a packed sequence, a tokenizer's batch
        return move(device)
    container = opened(value)
    return value if container is None else container.rebuild([_moved(child, device) for child in container.children])
