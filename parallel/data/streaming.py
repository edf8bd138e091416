"""The elastic sampler's counterpart for data that comes as a stream: no length, no random access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..place import place_of_this_process
from .sample_order import taker_in_stream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_STATE_VERSION = 1
_EPOCH, _POSITION, _WORLD_SIZE, _RANK, _FINISHED = range(5)


@runtime_checkable
class SeekableSource(Protocol[T_co]):
    """A source that can begin anywhere; any other iterable is read and thrown away up to the position."""

    def starting_at(self, epoch: int, position: int) -> Iterable[T_co]:
        """The items of an epoch from number ``position`` on, in the same order every time and on every rank."""


class ElasticStream(IterableDataset[T], Generic[T]):
    """A stream shared among ranks and loader workers, with a position that holds for every world size.

    Step k of a world of W ranks with batches of B uses the next W*B items of the stream, whatever the number of
    loader workers. Iterate through ``stream.batches(loader)``, or call ``stream.advance()`` after each step, and save
    ``state_dict()`` of rank 0. The last step may have items for some ranks only, unless ``drop_last`` leaves it out.

    With torchdata's ``StatefulDataLoader`` the loader's own state resumes exactly too, in a world of the same size
    and with as many workers.

    Args:
        source: an iterable that gives the same items in the same order each time, or a ``SeekableSource``.
            ``set_epoch(epoch)`` is called on it before each pass, where it has one.
        batch_size: of the loader, on each rank.
        num_replicas: ranks of the world; of the process group or the launcher's variables if ``None``.
        rank: this process's rank; as above.
        drop_last: leave out a last step that is not whole on every rank.
    """

    def __init__(
        self,
        source: Iterable[T] | SeekableSource[T],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        drop_last: bool = False,
    ) -> None:
        here = place_of_this_process()
        self.source = source
        self.batch_size = batch_size
        self.drop_last = drop_last
        # Shared memory, because persistent loader workers keep the copy of the dataset that they were started with.
        self._where = torch.zeros(5, dtype=torch.int64)
        self._where.share_memory_()  # type: ignore[no-untyped-call]
        self.set_world(here[1] if num_replicas is None else num_replicas, here[0] if rank is None else rank)
        self._steps = 0
        self._finished_here = False

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return int(self._where[_EPOCH])

    @property
    def num_replicas(self) -> int:
        """Ranks of the world."""
        return int(self._where[_WORLD_SIZE])

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._where[_RANK])

    @property
    def position(self) -> int:
        """Items of the epoch that training has consumed, over all ranks (rounded up to whole steps)."""
        return self.start + self._steps * self.num_replicas * self.batch_size

    @property
    def start(self) -> int:
        """The position that the present pass began at."""
        return int(self._where[_POSITION])

    @property
    def finished(self) -> bool:
        """Whether the epoch has no items left."""
        return bool(self._where[_FINISHED])

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        if worker is None:
            self.begin_pass()
        return StreamIterator(self, 0 if worker is None else worker.id, 1 if worker is None else worker.num_workers)

    def begin_pass(self) -> None:
        """Fix where the next pass begins; ``batches()`` and iteration without workers do it themselves."""
        self._start_at(0 if self._finished_here else self.position)

    def _start_at(self, position: int) -> None:
        if self._finished_here:  # an epoch asked for again
            self._where[_FINISHED] = False
        self._finished_here = False
        self._where[_POSITION] = position
        self._steps = 0

    def items_from(self, position: int) -> Iterator[T]:
        """The source's items of this epoch from ``position`` on."""
        if isinstance(self.source, SeekableSource):
            return iter(self.source.starting_at(self.epoch, position))
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(self.epoch)
        return islice(iter(self.source), position, None)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch at its first item; naming the present one again changes nothing."""
        if epoch != self.epoch:
            self._where[_EPOCH] = epoch
            self._where[_FINISHED] = False
            self._start_at(0)

    def set_world(self, num_replicas: int, rank: int) -> None:
        """Go on from the present position as one of another number of ranks (the next iteration sees it)."""
        if not 0 <= rank < num_replicas:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
        position = self.position if self.num_replicas else 0
        self._where[_WORLD_SIZE] = num_replicas
        self._where[_RANK] = rank
        self._where[_POSITION] = position
        self._steps = 0

    def advance(self, steps: int = 1) -> None:
        """Every rank has consumed ``steps`` batches."""
        self._steps += steps

    def finish_epoch(self) -> None:
        """The stream has ended for this epoch."""
        self._where[_FINISHED] = True
        self._finished_here = True

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The loader's batches; the position counts each one as soon as it is handed over.

        Raises:
            ValueError: the loader reads something else, or makes batches of another size.
        """
        if loader.dataset is not self:
            raise ValueError("batches() needs the loader that was made of this stream")
        if loader.batch_size != self.batch_size:
            raise ValueError(f"the loader's batch_size is {loader.batch_size}, the stream's {self.batch_size}")
        return self._counted(loader)

    def _counted(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self.begin_pass()
        if self.finished:
            return
        for batch in loader:
            self.advance()
            yield batch
        self.finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on; rank 0's is the one to keep."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "finished": self.finished,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, with the number of ranks that this stream has."""
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"stream state of version {state['version']}; this dlaunch reads version {_STATE_VERSION}")
        self._where[_EPOCH] = int(state["epoch"])
        self._finished_here = False
        self._where[_FINISHED] = bool(state["finished"])
        self._start_at(int(state["position"]))


class StreamIterator(Iterator[T], Generic[T]):
    """The items of one rank and one loader worker."""

    def __init__(self, stream: ElasticStream[T], worker: int, workers: int) -> None:
        self._stream = stream
        self._me = (stream.rank, worker)
        self._workers = workers
        self._start = stream.start
        self._given = 0  # items handed out since the start
        self._items = self._mine(self._start)

    def _mine(self, start: int) -> Iterator[T]:
        stream = self._stream
        world_size, batch_size = stream.num_replicas, stream.batch_size
        step_size = world_size * batch_size
        held: list[T] = []  # of a step that may yet turn out not to be whole
        if stream.finished:
            return
        for offset, item in enumerate(stream.items_from(start)):
            if taker_in_stream(offset, world_size, batch_size, self._workers) == self._me:
                held.append(item)
            if not stream.drop_last or (offset + 1) % step_size == 0:
                yield from held
                held.clear()

    def __next__(self) -> T:
        item = next(self._items)
        self._given += 1
        return item

    def state_dict(self) -> dict[str, int]:
        """Where the pass began, and how many items were handed out since."""
        return {"start": self._start, "world_size": self._stream.num_replicas, "given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the items that were handed out; raises ValueError in a world of another size."""
        if state["world_size"] != self._stream.num_replicas:
            raise ValueError(
                f"this loader state was taken with {state['world_size']} ranks, here are {self._stream.num_replicas}: "
                "load the stream's own state instead, and iterate through stream.batches(loader)"
            )
        self._start = state["start"]
        self._given = state["given"]
        self._items = islice(self._mine(self._start), self._given, None)
