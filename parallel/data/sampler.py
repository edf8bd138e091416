"""A distributed sampler that knows how far an epoch has come, and goes on from there in a world of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ..place import place_of_this_process
from .sample_order import Ending, Share

_STATE_VERSION = 1


class ElasticDistributedSampler(Sampler[int]):
    """torch's ``DistributedSampler`` with a position: every sample of an epoch exactly once, across restarts.

    The order of an epoch is torch's own for the same seed. The samples that a step uses, taken over all ranks, are
    the next ones of that order, so the position is one number that holds for every world size.

    The position is what training has *consumed*, not what loader workers have drawn ahead: iterate through
    ``sampler.batches(loader)``, or call ``sampler.advance(batch_size)`` after each step. Where neither is done, the
    position stays at the beginning and this is a plain distributed sampler. The state is the same for all ranks; save
    that of rank 0.

    Without padding (the default) the last step may have samples for some ranks only: ``steps`` and ``common_steps``
    say so to every rank alike. Use ``pad``, ``drop_last`` or a ``join()`` context in training.

    Args:
        dataset: anything with a length.
        num_replicas: ranks of the world; of the process group or the launcher's variables if ``None``.
        rank: this process's rank; as above.
        shuffle: draw a new order for each epoch.
        seed: of that order; the same on all ranks.
        drop_last: leave out the last samples (fewer than ranks) that do not divide evenly.
        pad: repeat samples from the beginning of the order at the end of the epoch, so that they do divide evenly.

    Raises:
        ValueError: a rank outside the world, or both ``drop_last`` and ``pad``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = False,
    ) -> None:
        if drop_last and pad:
            raise ValueError("drop_last and pad exclude each other: give one of them")
        here = place_of_this_process()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        self._ending = Ending.DROP if drop_last else Ending.PAD if pad else Ending.RAGGED
        self._finished_here = False
        self._share = self._cut(0, here[1] if num_replicas is None else num_replicas, here[0] if rank is None else rank)
        self._taken = 0  # samples of the share that training has consumed, on each rank

    def _cut(self, position: int, world_size: int, rank: int) -> Share:
        return Share(len(self.dataset), position, world_size, rank, self._ending)

    @property
    def num_replicas(self) -> int:
        """Ranks of the world."""
        return self._share.world_size

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._share.rank

    @property
    def position(self) -> int:
        """Samples of the epoch that training has consumed, over all ranks."""
        return len(self.dataset) if self._finished_here else self._share.consumed(self._taken)

    @property
    def num_samples(self) -> int:
        """Samples that this rank takes in a pass: from where it began (or will begin) to the end of the epoch."""
        return self._share.samples()

    @property
    def total_size(self) -> int:
        """The same over all ranks."""
        return sum(self._share.samples(rank) for rank in range(self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        if self._finished_here:  # an epoch asked for again, as torch's sampler allows
            self._start_at(0)
        else:
            self._start_at(self.position)
        return ShareIterator(self._order(), self._share)

    def _start_at(self, position: int) -> None:
        self._share = self._cut(position, self.num_replicas, self.rank)
        self._taken = 0
        self._finished_here = False

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)  # torch's DistributedSampler has the same order
        return torch.randperm(len(self.dataset), generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch at its first sample; naming the present one again changes nothing."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._start_at(0)

    def set_world(self, num_replicas: int, rank: int) -> None:
        """Go on from the present position as one of another number of ranks (the next iteration sees it)."""
        finished = self._finished_here
        self._share = self._cut(self.position, num_replicas, rank)
        self._taken = 0
        self._finished_here = finished

    def advance(self, batch_size: int) -> None:
        """Every rank has consumed a batch.

        Args:
            batch_size: the loader's, also for a last batch that is smaller, so that all ranks agree.
        """
        self._taken += batch_size
        self._finished_here = self._share.consumed(self._taken) == len(self.dataset)

    def finish_epoch(self) -> None:
        """Nothing more will be taken from this epoch (its rest, if any, was dropped by the loader)."""
        self._finished_here = True

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The loader's batches; the position counts each one as soon as it is handed over.

        Save the state after the step that used the batch. When the loader ends, so does the epoch.

        Raises:
            ValueError: the loader does not draw from this sampler, or its batches have no fixed size.
        """
        if _sampler_of(loader) is not self:
            raise ValueError("batches() needs the loader that was made with sampler=<this sampler>")
        size = loader.batch_size
        if size is None:
            raise ValueError("this loader has no batch_size: call sampler.advance(batch_size) after each step instead")
        return self._counted(loader, size)

    def _counted(self, loader: DataLoader[Any], size: int) -> Iterator[Any]:
        for batch in loader:
            self.advance(size)
            yield batch
        self.finish_epoch()

    def steps(self, batch_size: int, *, drop_last: bool = False, whole_epoch: bool = False) -> int:
        """Steps of this pass until no rank has a batch left: the same number on every rank.

        Args:
            batch_size: samples a batch on each rank.
            drop_last: the loader's ``drop_last``.
            whole_epoch: count from the first sample of the epoch, for schedules that span it.
        """
        return self._counted_from(whole_epoch).steps(batch_size, drop_last=drop_last)

    def common_steps(self, batch_size: int, *, drop_last: bool = False, whole_epoch: bool = False) -> int:
        """Steps of this pass in which every rank has a batch: ``steps``, or one fewer; the same on every rank."""
        return self._counted_from(whole_epoch).common_steps(batch_size, drop_last=drop_last)

    def _counted_from(self, whole_epoch: bool) -> Share:
        return self._cut(0, self.num_replicas, self.rank) if whole_epoch else self._share

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on; the same on all ranks after the same step (rank 0's is the one to keep)."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_size": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, with the number of ranks that this sampler has.

        The seed is taken over. An epoch that was complete yields nothing; the next ``set_epoch`` begins a new one.

        Raises:
            ValueError: the dataset has another size, or is shuffled otherwise, than where the state was taken.
        """
        if state["version"] != _STATE_VERSION:
            raise ValueError(
                f"sampler state of version {state['version']}; this dlaunch reads version {_STATE_VERSION}"
            )
        for name, here in (("dataset_size", len(self.dataset)), ("shuffle", self.shuffle)):
            if state["position"] and state[name] != here:
                raise ValueError(
                    f"the sampler state was taken in the middle of an epoch with {name}={state[name]}, "
                    f"here it is {here}: the rest of that epoch cannot be told; begin a new epoch instead"
                )
        self.epoch = int(state["epoch"])
        self.seed = int(state["seed"])
        self._start_at(int(state["position"]))


class ShareIterator(Iterator[int]):
    """Dataset indices of one rank's share, in order.

    Its own state says how far it was *drawn*: torchdata's ``StatefulDataLoader`` keeps that with each batch, and so
    resumes exactly in a world of the same size without ``advance``.
    """

    def __init__(self, order: Tensor, share: Share) -> None:
        self._order = order
        self._take(share, 0)

    def _take(self, share: Share, drawn: int) -> None:
        self._share = share
        self._indices: list[int] = self._order[torch.tensor(share.positions(), dtype=torch.int64)].tolist()
        self._drawn = drawn

    def __next__(self) -> int:
        if self._drawn >= len(self._indices):
            raise StopIteration
        self._drawn += 1
        return self._indices[self._drawn - 1]

    def state_dict(self) -> dict[str, int]:
        """Where the share began, and how many of its samples were drawn."""
        return {"start": self._share.start, "world_size": self._share.world_size, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the samples that were drawn; raises ValueError in a world of another size."""
        share = self._share
        if state["world_size"] != share.world_size:
            raise ValueError(
                f"this loader state was taken with {state['world_size']} ranks, here are {share.world_size}: "
                "load the sampler's own state instead, and iterate through sampler.batches(loader)"
            )
        self._take(Share(share.size, state["start"], share.world_size, share.rank, share.ending), state["drawn"])


def _sampler_of(loader: DataLoader[Any]) -> object:
    batch_sampler = cast(Any, loader).batch_sampler
    return getattr(batch_sampler, "sampler", loader.sampler)
