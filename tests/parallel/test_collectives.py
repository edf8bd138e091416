"""Collectives for user code: exact sizes, plain data only, and errors that say who waited for what."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dlaunch.parallel import collectives
from dlaunch.parallel.collective_error import CollectiveError, CollectiveTimeout, PeerLost, kind_of
from dlaunch.parallel.collective_opening import Opening, check_same_collective

from .worlds import World

SHAPES = [(3, 4), (), (0, 5), (2, 1, 1, 7)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.int16]
VALUES: list[Any] = [{"loss": 0.5, "name": "ü\ud800"}, [1, None, True, -math.inf], "x" * 5000, 10**40]


def tensor_of(rank: int, dtype: torch.dtype) -> Any:
    values = torch.arange(math.prod(SHAPES[rank])) * 3 + rank
    return values.to(dtype).reshape(SHAPES[rank])


def gather_tensors(rank: int) -> None:
    for dtype in DTYPES:
        gathered = collectives.all_gather(tensor_of(rank, dtype).t() if rank == 0 else tensor_of(rank, dtype))
        for other, tensor in enumerate(gathered):
            expected = tensor_of(other, dtype).t() if other == 0 else tensor_of(other, dtype)
            assert tensor.dtype is dtype and tensor.shape == expected.shape and torch.equal(tensor, expected)
    assert [tensor.shape for tensor in collectives.all_gather(torch.empty(0, rank))] == [
        (0, other) for other in range(dist.get_world_size())
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_tensors_arrive_whole_in_their_own_shapes_and_dtypes(world_of: Any, size: int) -> None:
    world_of(size).run(gather_tensors)


def gather_different_dtypes(rank: int) -> str:
    with pytest.raises(TypeError) as raised:
        collectives.all_gather(torch.ones(2, dtype=torch.float32 if rank else torch.int64))
    assert collectives.all_gather_object(rank) == [0, 1]  # nothing is left behind that would be taken for the next
    return str(raised.value)


def test_tensors_of_different_dtypes_are_refused_on_every_rank(world_of: Any) -> None:
    texts = world_of(2).run(gather_different_dtypes)
    expected = "the ranks call all_gather with different dtypes: ['int64', 'float32'] (in order of ranks)"
    assert texts == [expected] * 2


Error = type[Exception]
MISFITS: dict[str, tuple[Callable[[int], Any], Error, str]] = {
    "shapes": (
        lambda rank: collectives.all_reduce(torch.ones(2 + 3 * rank)),
        ValueError,
        "the ranks call all_reduce with different shapes: [(2,), (5,)]",
    ),
    "dtypes": (
        lambda rank: collectives.all_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank])),
        TypeError,
        "the ranks call all_reduce with different dtypes: ['float32', 'float64']",
    ),
    "operations": (
        lambda rank: collectives.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
        ValueError,
        "the ranks call all_reduce with different arguments",
    ),
    "sources": (
        lambda rank: collectives.broadcast_object("x", rank),
        ValueError,
        "the ranks call broadcast_object with different arguments: [0, 1]",
    ),
    "collectives": (
        lambda rank: collectives.barrier() if rank else collectives.all_gather_object("x"),
        CollectiveError,
        "in its place; all ranks must call the same collectives in the same order",
    ),
}


def call_a_misfit(rank: int, name: str) -> str:
    call, kind, _ = MISFITS[name]
    with pytest.raises(kind) as raised:
        call(rank)
    assert collectives.all_gather_object(rank) == [0, 1]  # the group is as good as before
    return str(raised.value)


@pytest.mark.parametrize("name", MISFITS)
def test_calls_that_do_not_go_together_are_told_on_every_rank(world_of: Any, name: str) -> None:
    for text in world_of(2).run(call_a_misfit, name):
        assert MISFITS[name][2] in text


def test_a_rank_that_called_another_collective_is_named() -> None:
    barrier = Opening("barrier", 0, (), "uint8")
    openings = [barrier, barrier, Opening("average", 0, (7,), "uint8")]
    with pytest.raises(CollectiveError, match="rank 1 of 3: barrier failed: rank 2 called average in its place"):
        check_same_collective(openings, 1)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: collectives.all_gather(torch.ones(2, 2).to_sparse()), "all_gather takes .* is torch.sparse_coo"),
        (lambda: collectives.all_gather(torch.ones(2, device="meta")), "all_gather takes .* this one is meta"),
        (lambda: collectives.all_reduce(torch.ones(2, device="meta")), "all_reduce takes .* this one is meta"),
        (lambda: collectives.all_reduce(torch.ones([1] * 17)), "at most 16 dimensions, not 17"),
        (lambda: collectives.average({"loss": torch.ones(3)}), "metric 'loss' is a tensor of 3 elements"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


def gather_lazy_bits(_rank: int) -> None:
    number = torch.tensor([1 + 2j])
    for tensor in (number.conj(), number.conj().imag):
        assert all(torch.equal(gathered, tensor) for gathered in collectives.all_gather(tensor))


def test_conjugated_and_negated_views_are_gathered_by_value(world_of: Any) -> None:
    world_of(2).run(gather_lazy_bits)


def call_from_outside(rank: int) -> None:
    group = dist.new_group([0])
    for call in COLLECTIVES.values():
        if rank == 1:
            with pytest.raises(ValueError, match="this process is not in the group"):
                call(group, None)


def test_a_rank_outside_the_group_is_told_so(world_of: Any) -> None:
    world_of(2).run(call_from_outside)


def exchange_objects(rank: int) -> None:
    size = dist.get_world_size()
    assert collectives.all_gather_object(VALUES[rank]) == VALUES[:size]
    assert collectives.all_gather_object((rank, "tuple")) == [[other, "tuple"] for other in range(size)]
    for source in range(size):
        assert collectives.broadcast_object(VALUES[rank], source) == VALUES[source]
    assert collectives.all_reduce(torch.tensor([rank + 1.0])).item() == size * (size + 1) / 2
    assert collectives.all_reduce(torch.tensor(rank), dist.ReduceOp.MAX).item() == size - 1
    collectives.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_objects_arrive_as_they_were_sent(world_of: Any, size: int) -> None:
    world_of(size).run(exchange_objects)


def exchange_in_a_group(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank:
        assert collectives.all_gather_object(rank, group) == [1, 2]
        assert collectives.broadcast_object(rank, 1, group) == 2
        assert [len(tensor) for tensor in collectives.all_gather(torch.ones(rank), group)] == [1, 2]
        assert collectives.average({"rank": rank}, rank, group) == {"rank": (1 + 4) / 3}


def test_a_group_counts_its_own_ranks(world_of: Any) -> None:
    world_of(3).run(exchange_in_a_group)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\] is a object"),
        (torch.ones(1), "value is a Tensor"),
        ({1: "a"}, "value has the key 1"),
        (b"bytes", "value is a bytes"),
        ({1, 2}, "value is a set"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_place(value: Any, place: str) -> None:
    for send in (collectives.all_gather_object, collectives.broadcast_object):
        with pytest.raises(TypeError, match=place):
            send(value)


def test_a_world_of_one_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    tensor = torch.ones(2, requires_grad=True)
    (gathered,) = collectives.all_gather(tensor)
    assert torch.equal(gathered, tensor) and gathered.data_ptr() != tensor.data_ptr()
    assert torch.equal(collectives.all_reduce(tensor), tensor)
    assert collectives.all_gather_object({"a": (1,)}) == [{"a": [1]}]
    assert collectives.broadcast_object("x") == "x"
    assert collectives.average({"loss": torch.tensor(2.0)}, 3) == {"loss": 2.0}
    collectives.barrier()
    with pytest.raises(ValueError, match="no rank 1 in a group of 1"):
        collectives.broadcast_object("x", 1)


def average_uneven(rank: int) -> dict[str, float]:
    # of 10 samples with the values 0..9, rank 0 has 7, rank 1 has 3, rank 2 has none
    mine = [list(range(7)), [7, 8, 9], []][rank]
    return collectives.average({"mean": sum(mine) / len(mine)} if mine else {}, len(mine))


def test_averages_are_those_over_all_samples_and_the_same_bits_on_every_rank(world_of: Any) -> None:
    assert world_of(3).run(average_uneven) == [{"mean": 4.5}] * 3


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(-1e6, 1e6)), min_size=1, max_size=8))
def test_weighted_means_are_bounded_by_what_they_are_means_of(reports: list[tuple[int, float]]) -> None:
    counted = [mean for count, mean in reports if count]
    named = [(float(count), {"m": mean}) for count, mean in reports]
    if not counted:
        with pytest.raises(ValueError, match="nothing to average"):
            collectives.weighted_means(named)
        return
    (mean,) = collectives.weighted_means(named).values()
    slack = 1e-9 * max(map(abs, counted))
    assert min(counted) - slack <= mean <= max(counted) + slack
    assert math.isclose(
        mean * sum(count for count, _ in reports), math.fsum(c * m for c, m in reports), rel_tol=1e-9, abs_tol=1e-3
    )


def test_ranks_that_average_different_metrics_are_named() -> None:
    with pytest.raises(ValueError, match=r"rank 1 averages \['loss'\] and rank 2 \['accuracy', 'loss'\]"):
        collectives.weighted_means([(0, {}), (2, {"loss": 1.0}), (2, {"loss": 1.0, "accuracy": 2.0})])


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_a_count_that_is_none_is_refused(count: float) -> None:
    with pytest.raises(ValueError, match="give the number of samples"):
        collectives.average({"a": 1.0}, count)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:2455. This is typically", PeerLost),
        ("Read error [127.0.0.1]:2455: Connection reset by peer", PeerLost),
        ("[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete", CollectiveTimeout),
        ("Operation timed out!", CollectiveTimeout),
        ("[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms", CollectiveTimeout),
        ("Rank 1 successfully reached monitoredBarrier, but ... Connection closed by peer", PeerLost),
        ("NCCL error: remote process exited or there was a network error", PeerLost),
        ("No backend type associated with device type cpu", CollectiveError),
    ],
)
def test_backends_messages_are_told_apart(message: str, kind: type[CollectiveError]) -> None:
    assert kind_of(message) is kind


Call = Callable[[dist.ProcessGroup, "float | None"], Any]
COLLECTIVES: dict[str, Call] = {
    "all_gather": lambda group, timeout_s: collectives.all_gather(torch.ones(2), group, timeout_s),
    "all_reduce": lambda group, timeout_s: collectives.all_reduce(torch.ones(2), group=group, timeout_s=timeout_s),
    "all_gather_object": lambda group, timeout_s: collectives.all_gather_object(1, group, timeout_s),
    "broadcast_object": lambda group, timeout_s: collectives.broadcast_object(1, 1, group, timeout_s),
    "average": lambda group, timeout_s: collectives.average({"a": 1}, group=group, timeout_s=timeout_s),
    "barrier": collectives.barrier,
}
Told = dict[str, tuple[str, str, int, int, float, str]]


def call_and_tell(rank: int, timeout_s: float | None, connected: str) -> Told:
    """Rank 0 calls each collective in a group of its own, and tells what it got; rank 1 waits to be killed."""
    groups = [dist.new_group([0, 1]) for _ in COLLECTIVES]
    for group in groups:
        dist.barrier(group)  # the ranks of each are connected
    if rank == 1:
        Path(connected).touch()
        threading.Event().wait()
    while timeout_s is None and not Path(connected).exists():
        time.sleep(0.01)
    told: Told = {}
    for group, (name, call) in zip(groups, COLLECTIVES.items(), strict=True):
        try:
            call(group, timeout_s)
        except CollectiveError as error:
            where = str(error.collective), error.rank or 0, error.world_size or 0, error.waited_s or 0.0
            told[name] = (type(error).__name__, *where, str(error))
    return told


def told_by_rank_0(timeout_s: float | None, folder: Path) -> Told:
    world = World(2)
    connected = folder / "connected"
    try:
        world.start(call_and_tell, timeout_s, str(connected))
        if timeout_s is None:
            deadline = time.monotonic() + 60
            while not connected.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            world.kill(1)
        told: Told = world.result(0)
    finally:
        world.close()
    return told


@pytest.fixture(scope="module")
def without_an_answer(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_rank_0(0.3, tmp_path_factory.mktemp("silent"))


@pytest.fixture(scope="module")
def with_a_dead_peer(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by_rank_0(None, tmp_path_factory.mktemp("dead"))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_does_not_come_is_a_time_out_that_names_the_rank_the_collective_and_the_wait(
    without_an_answer: Told, name: str
) -> None:
    kind, collective, rank, world_size, waited_s, text = without_an_answer[name]
    assert (kind, collective, rank, world_size) == ("CollectiveTimeout", name, 0, 2)
    assert waited_s >= 0.3 and text.startswith(f"rank 0 of 2: {name} failed after {waited_s:.1f} s: some rank did not")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_dies_is_a_lost_peer(with_a_dead_peer: Told, name: str) -> None:
    kind, collective, _, _, _, text = with_a_dead_peer[name]
    assert (kind, collective) == ("PeerLost", name)
    assert "another rank closed its connection" in text and "the rank that ended first" in text


def test_errors_are_caught_by_who_catches_what_torch_raises() -> None:
    assert issubclass(CollectiveError, RuntimeError)
    assert issubclass(CollectiveTimeout, TimeoutError) and issubclass(PeerLost, ConnectionError)
