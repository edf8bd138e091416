"""To and from torch.distributed.checkpoint."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dlaunch.parallel import checkpoint
from dlaunch.parallel.checkpoint import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_torch_loads_what_was_exported(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "ours", {"model": model, "optimizer": optimizer}, 1)
    found = checkpoint.latest(tmp_path / "ours")
    assert found is not None
    checkpoint.export_dcp(found, tmp_path / "theirs")
    target = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = {"model": target.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)  # type: ignore[attr-defined]
    assert_same(dict(model.state_dict()), dict(state["model"]))
    with pytest.raises(FileExistsError):
        checkpoint.export_dcp(found, tmp_path / "theirs")


def test_what_torch_saved_is_imported_and_an_optimizer_goes_on_with_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"epoch": 3, "note": "x", "pair": (1, 2.5), "list": [1, {"a": torch.ones(2)}]}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
    dcp.save(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)  # type: ignore[attr-defined]
    imported = checkpoint.import_dcp(tmp_path / "theirs")
    assert_same(dict(model.state_dict()), imported["model"])
    assert_same(optimizer.state_dict(), imported["optimizer"])
    assert imported["extra"]["epoch"] == 3
    assert imported["extra"]["pair"] == (1, 2.5)
    checkpoint.save(tmp_path / "ours", imported, 1)
    loaded = checkpoint.load(tmp_path / "ours", into={"optimizer": optimizer, "model": model})
    assert loaded is not None


def test_an_optimizer_without_state_comes_back_as_one(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    dcp.save({"o": optimizer.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)  # type: ignore[attr-defined]
    imported = checkpoint.import_dcp(tmp_path)["o"]
    assert imported["state"] == {}
    optimizer.load_state_dict(imported)


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(str(tmp_path / "it-ran"))))
    with pytest.raises(CheckpointError, match=r"it holds a posix\.mkdir"):
        checkpoint.import_dcp(tmp_path)
    assert not (tmp_path / "it-ran").exists()


def test_a_value_that_would_run_code_is_refused(tmp_path: Path) -> None:
    evil = {"x": Evil(str(tmp_path / "it-ran"))}
    dcp.save(evil, checkpoint_id=str(tmp_path), no_dist=True)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"'x' was not read, since that could run code.*posix\.mkdir"):
        checkpoint.import_dcp(tmp_path)
    assert not (tmp_path / "it-ran").exists()


def test_a_table_of_contents_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path), no_dist=True)  # type: ignore[attr-defined]
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names \.\./elsewhere"):
        checkpoint.import_dcp(tmp_path)


def test_what_is_no_checkpoint_of_torch_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no torch"):
        checkpoint.import_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="was not read"):
        checkpoint.import_dcp(tmp_path)
