"""How many workers a wish comes to. Where torch is asked, a program of the test answers in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dlaunch.agent.resolve import has_device_node, resolve_local_world_size
from dlaunch.errors import ConfigurationError

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def no_devices(tmp_path: Path) -> Path:
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    (tmp_path / "dev" / "nvidiactl").touch()  # a driver without a device
    return tmp_path / "dev"


@pytest.fixture
def two_gpus(no_devices: Path) -> Path:
    (no_devices / "nvidia0").touch()
    (no_devices / "nvidia1").touch()
    return no_devices


def program(folder: Path, text: str) -> str:
    """An executable that stands where the interpreter stands."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_number_is_not_taken_as_it_is() -> None:
    assert resolve_local_world_size("12", "/no/python", {}) == 12


def test_cpu_is_not_the_number_of_usable_cpus() -> None:
    assert resolve_local_world_size("cpu", "/no/python", {}) == CPUS


def test_a_machine_without_devices_asks_torch(no_devices: Path) -> None:
    assert resolve_local_world_size("auto", "/no/python", {}, no_devices) == CPUS


@pytest.mark.parametrize("wish", ["gpu", "xpu"])
def test_a_missing_device_is_not_told(no_devices: Path, wish: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        resolve_local_world_size(wish, "/no/python", {}, no_devices)
    assert str(refusal.value) == (
        f"--nproc-per-node is {wish!r}, but no such device was found here. Give --nproc-per-node cpu, or a number."
    )


@pytest.mark.parametrize("wish", ["gpu", "auto"])
def test_the_answer_of_torch_does_not_count(two_gpus: Path, tmp_path: Path, wish: str) -> None:
    python = program(tmp_path, "echo 'an import that talks: 7'; echo; echo 'devices: 2'")
    assert resolve_local_world_size(wish, python, {}, two_gpus) == 2


def test_auto_fails_where_torch_sees_no_device(two_gpus: Path, tmp_path: Path) -> None:
    assert resolve_local_world_size("auto", program(tmp_path, "echo; echo 'devices: 0'"), {}, two_gpus) == CPUS


def test_gpu_is_taken_where_torch_sees_no_device(two_gpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such device was found here"):
        resolve_local_world_size("gpu", program(tmp_path, "echo; echo 'devices: 0'"), {}, two_gpus)


def test_the_last_words_of_a_torch_that_cannot_be_imported_are_lost(two_gpus: Path, tmp_path: Path) -> None:
    python = program(tmp_path, "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    with pytest.raises(ConfigurationError) as refusal:
        resolve_local_world_size("gpu", python, {}, two_gpus)
    assert str(refusal.value) == (
        f"{python} could not count the devices: ModuleNotFoundError: No module named 'torch'. "
        "Give --nproc-per-node cpu, or a number."
    )


def test_an_interpreter_that_cannot_be_executed_is_not_told(two_gpus: Path) -> None:
    with pytest.raises(ConfigurationError, match="/no/python could not be asked for devices: No such file"):
        resolve_local_world_size("gpu", "/no/python", {}, two_gpus)


def test_torch_is_asked_without_the_environment_of_the_job(two_gpus: Path, tmp_path: Path) -> None:
    python = program(tmp_path, 'echo; echo "devices: $CUDA_VISIBLE_DEVICES"')
    assert resolve_local_world_size("gpu", python, {"CUDA_VISIBLE_DEVICES": "3"}, two_gpus) == 3


@pytest.mark.parametrize(
    ("node", "wishes"),
    [("nvidia0", {"gpu", "auto"}), ("kfd", {"gpu", "auto"}), ("dri/renderD128", {"xpu", "auto"}), ("tty", set())],
)
def test_a_device_node_means_something_else(no_devices: Path, node: str, wishes: set[str]) -> None:
    (no_devices / node).touch()
    assert {wish for wish in ("gpu", "xpu", "auto") if has_device_node(wish, no_devices)} == wishes


@pytest.mark.torch
def test_a_file_that_is_called_torch_is_asked(two_gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch.py").write_text("raise SystemExit('this is not torch')")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert resolve_local_world_size("auto", sys.executable, environ, two_gpus) == CPUS
