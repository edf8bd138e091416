"""Checkpoints of several ranks: real processes with a gloo group."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlaunch.parallel import PeerLost, checkpoint
from dlaunch.parallel.checkpoint import CheckpointError
from dlaunch.parallel.checkpoint.claim import CLAIM_NAME
from dlaunch.parallel.checkpoint.retention import Retention
from dlaunch.parallel.checkpoint.writer import Save, carry_out

from .worlds import RankFailed, World

ROWS = 7


def whole_tensor() -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3)


def rows_of(rank: int, world_size: int) -> tuple[int, int]:
    return ROWS * rank // world_size, ROWS * (rank + 1) // world_size


def save_sharded(rank: int, directory: str, background: bool, step: int) -> str | None:
    start, end = rows_of(rank, dist.get_world_size())
    saver = checkpoint.Saver(directory, background=background, shard_timeout_s=60)
    sharded = {"w": checkpoint.shard(whole_tensor()[start:end], start, (ROWS, 3)), "rank": rank}
    saver.save({"shared": step}, step, sharded=sharded)
    saver.save({"shared": step + 1}, step + 1, sharded=sharded)
    saver.close()
    return str(saver.published) if saver.published else None


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_writes_its_shard_and_the_first_publishes(
    world_of: Callable[[int], World], tmp_path: Path, background: bool
) -> None:
    published = world_of(3).run(save_sharded, str(tmp_path), background, 5)
    assert published == [str(tmp_path / "00000002-step-6"), None, None]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert [found.read_shard(rank)["rank"] for rank in range(3)] == [0, 1, 2]
    assert torch.equal(found.read_whole()["w"], whole_tensor())
    assert sorted(path.name for path in found.path.iterdir()) == [
        "manifest.json",
        *(f"shard-{rank:05d}-of-00003.pt" for rank in range(3)),
        "state.pt",
    ]
    checkpoint.consolidate(found, tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=True)["shared"] == 6


def load_own(_rank: int, directory: str) -> tuple[int, Any, int]:
    loaded = checkpoint.load(directory)
    assert loaded is not None
    return loaded.state["shared"], loaded.sharded and loaded.sharded["rank"], loaded.checkpoint.world_size


def test_ranks_get_their_shards_back_and_another_world_gets_the_whole(
    world_of: Callable[[int], World], tmp_path: Path
) -> None:
    world_of(3).run(save_sharded, str(tmp_path), False, 5)
    assert world_of(3).run(load_own, str(tmp_path)) == [(6, rank, 3) for rank in range(3)]
    assert world_of(2).run(load_own, str(tmp_path)) == [(6, None, 3)] * 2


def save_shared(rank: int, directory: str) -> int:
    with checkpoint.Saver(directory) as saver:
        for step in (1, 2, 3):
            saver.save({"rank": rank}, step)
    dist.barrier()
    loaded = checkpoint.load(directory)
    assert loaded is not None
    return int(loaded.state["rank"])


def test_what_all_ranks_share_is_written_by_the_first_alone(world_of: Callable[[int], World], tmp_path: Path) -> None:
    assert world_of(2).run(save_shared, str(tmp_path)) == [0, 0]


def save_shared_and_then_sharded(rank: int, directory: str) -> None:
    saver = checkpoint.Saver(directory, shard_timeout_s=60)
    if rank == 0:
        saver.save({"x": 1}, 1)
    saver.save({"x": 2}, 2)
    saver.save({"x": 3}, 3, sharded={"rank": rank})
    saver.close()


def test_savers_that_were_used_unevenly_before_still_meet_in_a_sharded_save(
    world_of: Callable[[int], World], tmp_path: Path
) -> None:
    world_of(2).run(save_shared_and_then_sharded, str(tmp_path))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.read_shard(1) == {"rank": 1}


def save_on_own_disks(rank: int, directory: str) -> str:
    saver = checkpoint.Saver(f"{directory}/{rank}", background=False, shard_timeout_s=0.5)
    try:
        saver.save(None, 1, sharded={"rank": rank})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_do_not_share_the_directory_are_told_so(world_of: Callable[[int], World], tmp_path: Path) -> None:
    first, second = world_of(2).run(save_on_own_disks, str(tmp_path))
    assert "no shard of rank 1 within 0.5 s" in first
    assert "as the same directory" in first
    assert "another rank failed" in second
    assert checkpoint.latest(tmp_path / "0") is None


def save_with_an_obstacle(rank: int, directory: str) -> str:
    saver = checkpoint.Saver(directory, background=False, shard_timeout_s=60)
    saver.save(None, 1, sharded={"rank": rank})
    if rank == 1:
        Path(directory, f".step-2.{saver._shared_token}-2.partial", "shard-00001-of-00002.pt").mkdir(parents=True)
    try:
        saver.save(None, 2, sharded={"rank": rank})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_cannot_write_its_shard_is_named_by_the_first(
    world_of: Callable[[int], World], tmp_path: Path
) -> None:
    first, second = world_of(2).run(save_with_an_obstacle, str(tmp_path))
    assert "rank 1 could not write its shard" in first
    assert "step 2 was not written: File exists" in second
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1


def die_while_saving(rank: int, directory: str) -> str:
    saver = checkpoint.Saver(directory, shard_timeout_s=1.0)
    saver.save({}, 1, sharded={"rank": rank})
    saver.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    saver.save({}, 2, sharded={"rank": rank})
    try:
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_dies_before_its_shard_is_written_costs_that_checkpoint_only(tmp_path: Path) -> None:
    world = World(2)
    try:
        world.start(die_while_saving, str(tmp_path))
        assert "no shard of rank 1" in world.result(0)
        with pytest.raises(RankFailed):
            world.result(1)
    finally:
        world.close()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert {path.name for path in tmp_path.iterdir()} - {CLAIM_NAME} == {found.path.name}


def test_a_rank_whose_shard_is_published_at_once_is_not_told_that_it_failed(tmp_path: Path) -> None:
    save = Save(tmp_path, 1, "token", 1, 2, None, {"rank": 1})
    note = save.partial / "shard-00001-of-00002.pt.json"

    def publish_in_its_way(_event: str, arguments: tuple[Any, ...]) -> None:
        is_path = bool(arguments) and isinstance(arguments[0], (str, os.PathLike))
        if is_path and Path(arguments[0]) == save.partial and note.exists():
            save.partial.rename(tmp_path / "00000001-step-1")

    pid = os.fork()  # an audit hook stays for ever
    if pid == 0:
        sys.addaudithook(publish_in_its_way)
        try:
            carry_out(save, Retention(), None, 1.0, threading.Event())
        except CheckpointError:
            os._exit(1)
        os._exit(0 if note.exists() else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fail_while_a_peer_is_dead(rank: int, directory: str) -> str:
    dist.barrier()
    saver = checkpoint.Saver(directory)  # which would wait for half an hour
    try:
        with saver:
            saver.save({}, 1, sharded={"rank": rank})
            saver.wait()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            saver.save({}, 2, sharded={"rank": rank})
            for _ in range(100):
                dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_whose_peer_died_does_not_wait_long_for_its_shard(tmp_path: Path) -> None:
    world = World(2)
    try:
        world.start(fail_while_a_peer_is_dead, str(tmp_path))
        assert world.result(0) == "RuntimeError"
    finally:
        world.close()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1


def meet_a_dead_peer(rank: int, what: str, directory: str) -> str:
    request = checkpoint.CheckpointRequest()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[], object]] = {
        "CheckpointRequest.requested": request.requested,
        "Saver.save": lambda: checkpoint.Saver(directory).save({}, 1, sharded={}),
        "checkpoint.load": lambda: checkpoint.load(directory),
    }
    try:
        for _ in range(100):  # what the first rank sends may fit into a buffer
            calls[what]()
    except PeerLost as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["CheckpointRequest.requested", "Saver.save", "checkpoint.load"])
def test_a_dead_peer_is_told_with_the_rank_and_what_was_waited_for(tmp_path: Path, what: str) -> None:
    world = World(2)
    try:
        world.start(meet_a_dead_peer, what, str(tmp_path))
        assert world.result(0).startswith(f"rank 0 of 2: {what} failed after ")
    finally:
        world.close()


def load_damaged(rank: int, directory: str) -> tuple[str, int | None]:
    mine = directory if rank == 0 else f"{directory}-not-here"
    try:
        loaded = checkpoint.load(mine)
    except CheckpointError as error:
        return str(error), None
    return "loaded", loaded.step if loaded else None


def test_if_one_rank_cannot_read_the_checkpoint_no_rank_goes_on(
    world_of: Callable[[int], World], tmp_path: Path
) -> None:
    assert world_of(2).run(load_damaged, str(tmp_path)) == [("loaded", None)] * 2
    checkpoint.save(tmp_path, {"x": 1}, 1)
    first, second = world_of(2).run(load_damaged, str(tmp_path))
    assert "another rank cannot read it" in first[0]
    assert "file system that all nodes share" in second[0]
    for file in tmp_path.glob("*/state.pt"):
        file.write_bytes(b"")
    first, second = world_of(2).run(load_damaged, str(tmp_path))
    assert "No checkpoint in" in first[0]
    assert "another rank cannot read it" in second[0]


def ask(rank: int, asked_at: dict[int, tuple[int, ...]], every: int = 1, settle_s: float = 0.0) -> list[int]:
    before = signal.getsignal(signal.SIGUSR1)
    request = checkpoint.CheckpointRequest(every=every, settle_s=settle_s)
    answers = []
    for step in range(12):
        if step in asked_at.get(rank, ()):
            os.kill(os.getpid(), signal.SIGUSR1)
        if request.requested():
            answers.append(step)
    request.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    return answers


def test_a_signal_to_one_rank_asks_all_ranks_at_the_same_step(world_of: Callable[[int], World]) -> None:
    assert world_of(3).run(ask, {1: (2, 3, 8)}) == [[2, 3, 8]] * 3
    assert world_of(3).run(ask, {1: (2, 3, 8)}, 4) == [[3, 11]] * 3


def test_ranks_that_notice_one_request_at_different_steps_save_once(world_of: Callable[[int], World]) -> None:
    assert world_of(3).run(ask, {0: (3,), 1: (2,), 2: (4,)}, 1, 60.0) == [[2]] * 3
    assert world_of(3).run(ask, {0: (3,), 1: (2,), 2: (4,)}, 1, 0.0) == [[2, 3, 4]] * 3


def test_a_handler_that_was_there_before_is_called_too() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: calls.append(number))
    request = checkpoint.CheckpointRequest([signal.SIGUSR2])
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert request.requested()
        assert not request.requested()
        assert calls == [signal.SIGUSR2]
    finally:
        request.close()
        signal.signal(signal.SIGUSR2, before)
