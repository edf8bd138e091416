"""Damaged checkpoints are named and passed over; failed saves leave what was there untouched."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dlaunch.parallel import checkpoint
from dlaunch.parallel.checkpoint import CheckpointError, DamagedCheckpoint, DamagedCheckpointWarning
from dlaunch.parallel.checkpoint.atomic_file import write_durably
from dlaunch.parallel.checkpoint.manifest import FileEntry, Manifest
from dlaunch.parallel.checkpoint.reader import open_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with a checkpoint of step 1 and one of step 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {"w": torch.full((500,), float(step)), "n": step}, step)
    return tmp_path


def last(directory: Path) -> Path:
    return directory / "00000002-step-2"


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_a_changed_byte_anywhere_in_a_file_is_noticed(two: Path, name: str) -> None:
    file = last(two) / name
    content = bytearray(file.read_bytes())
    places = {0, len(content) - 1, *range(0, len(content), max(1, len(content) // 150))}
    generator = random.Random(1)
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= 1 << generator.randrange(8)
        if name == "manifest.json" and _means_the_same(bytes(changed), bytes(content)):
            continue
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint, match="00000002-step-2 is damaged"):
            open_checkpoint(last(two))
    file.write_bytes(content)
    open_checkpoint(last(two))


def _means_the_same(one: bytes, other: bytes) -> bool:
    with contextlib.suppress(ValueError):
        return bool(json.loads(one) == json.loads(other))
    return False


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999, 1.1])
def test_a_file_that_is_cut_or_too_long_is_noticed_and_the_one_before_is_used(
    two: Path, name: str, kept: float
) -> None:
    file = last(two) / name
    content = file.read_bytes()
    file.write_bytes((content + b"x" * len(content))[: int(len(content) * kept)])
    with pytest.warns(DamagedCheckpointWarning, match=r"00000002-step-2 is damaged: .*Using 00000001-step-1 instead"):
        loaded = checkpoint.load(two)
    assert loaded is not None
    assert loaded.state["n"] == 1
    assert bool((loaded.state["w"] == 1).all())


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / "state.pt").unlink(), "state.pt: No such file"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
        (lambda path: (path / "manifest.json").write_text("[]"), "not a whole manifest"),
        (lambda path: (path / "manifest.json").write_text('{"crc32": "0"}'), "does not agree with its own checksum"),
        (lambda path: [f.unlink() for f in path.iterdir()], "manifest.json: No such file"),
        (replace_by_a_file, "Not a directory"),
    ],
)
def test_what_is_missing_is_named(two: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(last(two))
    with pytest.warns(DamagedCheckpointWarning, match=sentence):
        found = checkpoint.latest(two)
    assert found is not None
    assert found.step == 1


def test_where_no_checkpoint_is_whole_the_job_does_not_silently_begin_anew(two: Path) -> None:
    for path in two.iterdir():
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole: .*step-2 .*step-1 .*begin anew"):
        checkpoint.load(two)


def test_a_manifest_of_another_format_or_with_a_path_is_not_followed(two: Path) -> None:
    secret = two / "secret.pt"
    torch.save({"n": 3}, secret)
    entry = FileEntry("../secret.pt", secret.stat().st_size, 0)
    (last(two) / "manifest.json").write_bytes(Manifest(2, 1, (entry,)).encode())
    with pytest.raises(DamagedCheckpoint, match=r"names a file '\.\./secret\.pt'"):
        open_checkpoint(last(two))


def test_a_state_file_that_would_run_code_is_refused(two: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(two / "it-ran"),)

    file = last(two) / "state.pt"
    file.unlink()
    written = write_durably(file, lambda out: torch.save({"x": Evil()}, cast(Any, out)))
    manifest = Manifest(2, 1, (FileEntry("state.pt", written.size, written.crc32),))
    (last(two) / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(CheckpointError, match=r"state\.pt was not read, since that could run code.*posix\.mkdir"):
        checkpoint.load(two)
    assert not (two / "it-ran").exists()


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(two: Path) -> None:
    (last(two) / "state.pt").unlink()
    checkpoint.save(two, {"n": 3}, 3, keep_last=2)
    assert sorted(path.name for path in two.iterdir()) == ["00000001-step-1", "00000002-step-2", "00000003-step-3"]
    checkpoint.save(two, {"n": 4}, 4, keep_last=2)
    assert sorted(path.name for path in two.iterdir()) == ["00000003-step-3", "00000004-step-4"]


@pytest.mark.parametrize("limit", [0, 1, 100, 5000, 20_000])
def test_a_file_that_cannot_grow_is_told_with_what_remains_and_leaves_nothing_behind(two: Path, limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError) as refused:
            checkpoint.save(two, {"w": torch.zeros(5000)}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.match(r"^The checkpoint of step 3 was not written: File too large \(.*/state\.pt\)\.")
    assert refused.match(r"The last one published is 00000002-step-2\.$")
    assert sorted(path.name for path in two.iterdir()) == ["00000001-step-1", "00000002-step-2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB; skips where it may not be mounted."""
    point = tmp_path / "disk"
    point.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(point)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a file system may not be mounted here")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(small_disk: Path) -> None:
    directory = small_disk / "checkpoints"
    checkpoint.save(directory, {"w": torch.ones(10_000)}, 1)
    saver = checkpoint.Saver(directory, keep_last=1)
    saver.save({"w": torch.zeros(100_000)}, 2)
    with pytest.raises(CheckpointError, match=r"step 2 was not written: No space left on device .*00000001-step-1"):
        saver.save({"w": torch.zeros(1)}, 3)
    saver.save({"w": torch.zeros(1)}, 4)  # the half-written one is gone, so there is room
    saver.close()
    assert [path.name for path in directory.iterdir()] == ["00000002-step-4"]


def test_a_directory_that_cannot_be_made_or_read_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 was not written: Not a directory .*None was published"):
        checkpoint.save(tmp_path / "file", {}, 1)
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        checkpoint.load(tmp_path / "file")


def test_a_directory_without_permission_is_told_in_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    was_root = os.geteuid() == 0
    if was_root:  # who may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match="step 1 was not written: Permission denied"):
            checkpoint.save(tmp_path / "checkpoints", {}, 1)
    finally:
        if was_root:
            os.seteuid(0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "kills"), [("sampler", 30), ("stream", 15)])
def test_the_last_good_checkpoint_and_every_sample_survive_kills(kind: str, kills: int) -> None:
    program = str(ROOT / "benchmarks" / "checkpoint_kills.py")
    command = [sys.executable, program, "--kills", str(kills), "--seed", "11", "--kind", kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["kills"] == sum(summary["by"].values()) == kills
    assert summary["steps"] > 0
    assert any("several ranks" in by for by in summary["by"])


def test_a_consolidated_file_appears_whole_or_not_at_all(two: Path) -> None:
    found = checkpoint.latest(two)
    assert found is not None
    target = two / "whole.pt"
    checkpoint.consolidate(found, target)
    read = torch.load(target, weights_only=True)
    assert torch.equal(read["w"], torch.full((500,), 2.0))
    with pytest.raises(FileExistsError):
        checkpoint.consolidate(found, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(two) == found
