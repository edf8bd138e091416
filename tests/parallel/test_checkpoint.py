"""Saving, finding and loading in one process."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlaunch.parallel import checkpoint
from dlaunch.parallel.checkpoint import CheckpointError, Saver
from dlaunch.parallel.checkpoint.manifest import published_in


def numbers(directory: Path) -> list[int]:
    return [name.step for name in published_in(directory)]


class Job:
    """A small model with everything that training has, which draws random numbers in each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu")
        self.objects = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "random": checkpoint.RandomState(),
        }

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(8, 6) * random.random()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def parameters(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def test_a_job_that_is_loaded_goes_on_bit_for_bit(tmp_path: Path) -> None:
    job = Job()
    job.train(5)
    with Saver(tmp_path) as saver:
        saver.save(job.objects, 5)
        losses = job.train(5)  # while the checkpoint is written
    again = Job()
    again.train(2)
    loaded = checkpoint.load(tmp_path, into=again.objects)
    assert loaded is not None
    assert loaded.step == 5
    assert again.train(5) == losses
    for ours, theirs in zip(again.parameters(), job.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_loaded_from_a_directory_in_which_nothing_was_saved(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None


def test_plain_torch_reads_the_state_without_trusting_a_pickle(tmp_path: Path) -> None:
    job = Job()
    checkpoint.save(tmp_path, job.objects, 3)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = torch.load(found.path / "state.pt", weights_only=True)
    job.model.load_state_dict(state["model"])
    assert set(state) == set(job.objects)


def test_the_last_published_is_the_latest_even_after_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, {"x": step}, step)
    loaded = checkpoint.load(tmp_path, step=10)
    assert loaded is not None
    assert loaded.state == {"x": 10}
    checkpoint.save(tmp_path, {"x": 15}, 15, keep_last=2)
    again = checkpoint.load(tmp_path)
    assert again is not None
    assert again.step == 15
    assert numbers(tmp_path) == [15, 30]


def test_a_step_may_be_saved_twice_and_the_second_counts(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, 7)
    checkpoint.save(tmp_path, {"x": 2}, 7)
    loaded = checkpoint.load(tmp_path, step=7)
    assert loaded is not None
    assert loaded.state == {"x": 2}


def test_the_metadata_is_readable_without_loading_tensors(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {}, 1, metadata={"loss": 0.5, "tags": ["a"]})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.metadata == {"loss": 0.5, "tags": ["a"]}
    with pytest.raises(CheckpointError, match="must be JSON"):
        checkpoint.save(tmp_path, {}, 2, metadata={"loss": {1, 2}})
    with pytest.raises(CheckpointError, match="must be JSON"):
        checkpoint.save(tmp_path, {}, 2, metadata={"loss": float("nan")})


def test_the_last_ones_and_the_milestones_are_kept(tmp_path: Path) -> None:
    with Saver(tmp_path, keep_last=2, keep_every=30) as saver:
        for step in range(10, 101, 10):
            saver.save({"x": step}, step)
    assert numbers(tmp_path) == [100, 90, 60, 30]
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")) == []


def test_what_is_changed_after_save_returned_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    weights = torch.zeros(1000, 1000)
    with Saver(tmp_path) as saver:
        saver.save({"w": weights}, 1)
        weights.fill_(1.0)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert not loaded.state["w"].any()


def test_save_returns_before_the_checkpoint_is_published_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    may_publish, asked = threading.Event(), threading.Event()

    def guard() -> bool:
        asked.set()
        return may_publish.wait(60)

    saver = Saver(tmp_path, publish_guard=guard)
    saver.save({"x": 1}, 1)
    assert asked.wait(60)
    assert saver.is_writing
    assert numbers(tmp_path) == []
    may_publish.set()
    saver.save({"x": 2}, 2)
    assert 1 in numbers(tmp_path)
    saver.close()
    assert numbers(tmp_path) == [2, 1]
    assert saver.published == tmp_path / "00000002-step-2"


def test_a_process_that_was_replaced_does_not_publish(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save(tmp_path, {"x": 1}, 1)
    saver = Saver(tmp_path, publish_guard=lambda: False)
    with caplog.at_level(logging.ERROR):
        saver.save({"x": 2}, 2)
        with pytest.raises(CheckpointError, match="may no longer speak for the job"):
            saver.wait()
    assert "may no longer speak" in caplog.text
    saver.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["00000001-step-1"]
    saver.close()


def test_a_state_that_could_not_be_read_back_is_refused_with_its_place(tmp_path: Path) -> None:
    class Mine:
        pass

    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is a .*Mine"):
        checkpoint.save(tmp_path, {"a": [1, Mine()]}, 1)
    assert not list(tmp_path.iterdir())


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2), "extra": {"n": 1}}, 1)
    with pytest.raises(CheckpointError, match=r"no state\['optimizer'\]. It has 'model', 'extra'"):
        checkpoint.load(tmp_path, into={"optimizer": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"state\['extra'\]\['n'\] is a int, which cannot take a state"):
        checkpoint.load(tmp_path, into={"extra": {"n": 1}})


@pytest.mark.parametrize("wrapped_when_saved", [False, True])
def test_a_model_may_be_wrapped_otherwise_than_when_it_was_saved(tmp_path: Path, wrapped_when_saved: bool) -> None:
    plain, other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compiled = torch.compile(other, backend="eager")
    assert isinstance(compiled, nn.Module)
    wrapped = nn.DataParallel(compiled)
    saved, target = (wrapped, plain) if wrapped_when_saved else (plain, wrapped)
    checkpoint.save(tmp_path, {"model": saved}, 1)
    loaded = checkpoint.load(tmp_path, into={"model": target})
    assert loaded is not None
    assert list(loaded.state["model"]) == list(plain.state_dict())
    for ours, theirs in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_leftovers_of_killed_saves_are_removed_by_the_next_job(tmp_path: Path) -> None:
    for name in (".step-5.0123-1.partial", ".00000001-step-1.77.deleting"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.save(tmp_path, {}, 6)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["00000001-step-6", "notes.txt"]


def test_a_second_saver_does_not_sweep_away_what_the_first_is_writing(tmp_path: Path) -> None:
    may_publish, asked = threading.Event(), threading.Event()

    def guard() -> bool:
        asked.set()
        return may_publish.wait(60)

    saver = Saver(tmp_path, publish_guard=guard)
    saver.save({"x": 1}, 1)
    assert asked.wait(60)
    checkpoint.save(tmp_path, {"x": 2}, 2)
    may_publish.set()
    saver.close()
    assert numbers(tmp_path) == [1, 2]


def test_readers_beside_a_writer_that_deletes_always_find_a_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": torch.zeros(2000)}, 0)
    stop = threading.Event()
    problems: list[BaseException] = []
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            try:
                loaded = checkpoint.load(tmp_path)
                assert loaded is not None
                assert bool((loaded.state["x"] == loaded.step).all())
                seen.append(loaded.step)
            except BaseException as error:
                problems.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reader in readers:
            reader.start()
        with Saver(tmp_path, keep_last=1) as saver:
            for step in range(1, 60):
                saver.save({"x": torch.full((2000,), float(step))}, step)
        stop.set()
        for reader in readers:
            reader.join()
    assert problems == []
    assert seen


def test_the_state_of_a_random_generator_includes_numpys(tmp_path: Path) -> None:
    numpy: Any = pytest.importorskip("numpy")
    checkpoint.save(tmp_path, {"random": checkpoint.RandomState()}, 1)
    drawn = (random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist())
    checkpoint.load(tmp_path, into={"random": checkpoint.RandomState()})
    assert (random.random(), torch.rand(3).tolist(), numpy.random.rand(3).tolist()) == drawn


def test_a_with_statement_that_is_left_by_an_error_raises_that_error_whatever_became_of_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path, publish_guard=lambda: False)
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError), saver:
        saver.save({"x": 1}, 1)
        raise ZeroDivisionError
    assert "may no longer speak" in caplog.text
    assert list(tmp_path.iterdir()) == []
