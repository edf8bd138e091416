"""The password of etcd comes from a file that nobody else can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlaunch.errors import ConfigurationError
from dlaunch.secret import password_of, read_password_file
from dlaunch.spec import RendezvousSpec


def password_file(folder: Path, content: bytes = b"hunter2\n", mode: int = 0o600) -> Path:
    path = folder / "password"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [b"hunter2", b"hunter2\n", b"hunter2\r\n"])
def test_the_end_of_the_line_is_part_of_the_password(tmp_path: Path, content: bytes) -> None:
    assert read_password_file(password_file(tmp_path, content)) == "hunter2"


def test_spaces_are_no_part_of_the_password(tmp_path: Path) -> None:
    assert read_password_file(password_file(tmp_path, " hünter 2 \n".encode())) == " hünter 2 "


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666, 0o620])
def test_a_file_that_others_can_use_is_read(tmp_path: Path, mode: int) -> None:
    path = password_file(tmp_path, mode=mode)
    with pytest.raises(ConfigurationError) as refusal:
        read_password_file(path)
    assert refusal.value.sentence.endswith("cannot be used: others can read or change it.")
    assert "hunter2" not in str(refusal.value)
    change = refusal.value.fix.removeprefix("Say: ").removesuffix(".")
    assert os.system(change) == 0
    assert read_password_file(path) == "hunter2"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_the_group_may_read_a_file_of_a_user_but_not_of_root(tmp_path: Path) -> None:
    path = password_file(tmp_path, mode=0o440)
    assert read_password_file(path) == "hunter2"  # root's, as Kubernetes mounts a secret
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigurationError, match="chmod go= "):
        read_password_file(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"hunter2\nhunter3\n", "it holds more than one line"),
        (b"hunter2\0", "it holds more than one line"),
        (b"x" * 5000, "it holds more than one line"),
        (b"hunter2\xff", "it is not UTF-8"),
    ],
)
def test_a_file_without_a_password_is_taken(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read_password_file(password_file(tmp_path, content))
    assert f"cannot be used: {reason}." in str(refusal.value)
    assert "hunter" not in str(refusal.value)


def test_a_missing_file_a_folder_or_a_pipe_hangs_or_makes_a_traceback(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path, "it is not a regular file"),
        (tmp_path / "pipe", "it is not a regular file"),
        (Path("a\0b"), "a bad name"),
    ):
        with pytest.raises(ConfigurationError) as refusal:
            read_password_file(path)
        assert f"cannot be used: {reason}." in str(refusal.value)


def test_the_file_does_not_count_before_the_variable(tmp_path: Path) -> None:
    path = password_file(tmp_path)
    assert password_of(RendezvousSpec(1, 2, ("e:1",), user="a", password="b")) == "b"
    assert password_of(RendezvousSpec(1, 2, ("e:1",), user="a", password="b", password_file=path)) == "hunter2"
    assert password_of(RendezvousSpec(1, 2, ("e:1",))) is None
