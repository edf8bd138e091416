"""One job at a time saves into a directory: the claim on it, between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlaunch.parallel import checkpoint
from dlaunch.parallel.checkpoint import CheckpointError
from dlaunch.parallel.checkpoint.claim import CLAIM_NAME, Holder, claim, refusal, release

from .worlds import World

HOLD = """
import sys
from pathlib import Path
from dlaunch.parallel.checkpoint.claim import claim
print(claim(Path(sys.argv[1]), in_a_group=False), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job(directory: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the claim on ``directory``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "None\n"
            yield process
        finally:
            process.kill()


def test_a_second_job_is_refused_in_one_sentence_until_the_first_has_ended(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"mine": True}, 1)
    half = tmp_path / ".step-2.0123.partial"
    with another_job(tmp_path) as other:
        half.mkdir()  # what the other job is writing
        for background in (True, False):
            with pytest.raises(CheckpointError) as refused:
                checkpoint.Saver(tmp_path, background=background).save({"mine": True}, 2)
            assert f"Process {other.pid} on " in str(refused.value)
            assert f"saves into {tmp_path} already. Give this job a directory of its own" in str(refused.value)
        assert half.exists()
        found = checkpoint.latest(tmp_path)  # reading is free
        assert found is not None
        assert found.step == 1
    checkpoint.save(tmp_path, {"mine": True}, 2)  # it was killed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001-step-1", "00000002-step-2"]


def test_savers_of_one_process_share_the_claim_and_the_last_to_close_lets_go(tmp_path: Path) -> None:
    first, second = checkpoint.Saver(tmp_path), checkpoint.Saver(tmp_path)
    first.save({}, 1)
    second.save({}, 2)
    first.close()
    assert (tmp_path / CLAIM_NAME).exists()
    second.close()
    assert not (tmp_path / CLAIM_NAME).exists()
    with another_job(tmp_path):
        pass


def test_a_forked_child_neither_has_the_claim_nor_takes_it_away(tmp_path: Path) -> None:
    saver = checkpoint.Saver(tmp_path)
    saver.save({}, 1)
    pid = os.fork()
    if pid == 0:
        told = claim(tmp_path, in_a_group=False)
        release(tmp_path)
        os._exit(0 if told is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    again = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True, check=True
    )
    assert f"Process {os.getpid()} on " in again.stdout
    saver.close()


def test_a_directory_that_was_deleted_and_made_again_is_claimed_anew(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert claim(directory, in_a_group=False) is None
    (directory / CLAIM_NAME).unlink()
    with another_job(directory):
        assert claim(directory, in_a_group=False) is not None


def save_while_refused(rank: int, directory: str) -> str:
    try:
        with checkpoint.Saver(directory, background=False, shard_timeout_s=60) as saver:
            saver.save({}, 1, sharded={"rank": rank})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_all_ranks_hear_that_the_first_was_refused(world_of: Callable[[int], World], tmp_path: Path) -> None:
    with another_job(tmp_path):
        first, second = world_of(2).run(save_while_refused, str(tmp_path))
    assert "saves into" in first
    assert "another rank failed" in second
    assert world_of(2).run(save_while_refused, str(tmp_path)) == ["saved", "saved"]


def test_ranks_without_a_process_group_do_not_save_beside_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"TORCHELASTIC_RUN_ID": "exp7", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in {**job, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with another_job(tmp_path, **job, RANK="0"):
        with pytest.raises(CheckpointError, match=r"Ranks 0 and 1 both save into .* init_process_group\(\) before"):
            checkpoint.save(tmp_path, {}, 1)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        checkpoint.save(tmp_path, {}, 1)  # after a restart: what holds it is about to end


HERE = Holder("a", 7, "exp7", "2", "0")


@pytest.mark.parametrize(
    ("holder", "in_a_group", "sentence"),
    [
        (Holder("b", 9, "exp7", "1", "0"), False, None),
        (Holder("b", 9, "exp7", "2", "3"), True, None),  # another was the first rank before
        (Holder("b", 9, "exp7", "2", "3"), False, "Ranks 3 and 0 both save"),
        (Holder("b", 9, "exp8", "2", "3"), True, "Process 9 on b saves into"),
        (Holder("b", 9, "", "", ""), True, "Process 9 on b saves into"),
        (Holder(), True, "Another process saves into"),
    ],
)
def test_who_is_refused(holder: Holder, in_a_group: bool, sentence: str | None) -> None:
    told = refusal(Path("checkpoints"), holder, HERE, in_a_group=in_a_group)
    assert (told is None) if sentence is None else sentence in str(told)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 1}', b'{"host": "a", "pid": "x"}', b"\xff"])
def test_a_claim_that_cannot_be_read_is_that_of_another_process(content: bytes) -> None:
    assert Holder.parse(content) == Holder()


def test_jobs_that_torchrun_gave_no_name_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Holder.here().run == ""
