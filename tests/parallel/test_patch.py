"""Ours under torch's names: before torch is imported, after, and through every name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlaunch.errors import UsageError
from dlaunch.parallel.scripts import patch

from .programs import run_ranks

NAMES = """
import torch, torch.nn as nn
import torch.nn.parallel, torch.nn.parallel.distributed
from torch.nn.parallel import DistributedDataParallel as DDP
import dlaunch.parallel
ours = dlaunch.parallel.DistributedDataParallel
assert DDP is torch.nn.parallel.DistributedDataParallel is torch.nn.parallel.distributed.DistributedDataParallel is ours
assert nn.DataParallel is torch.nn.parallel.DataParallel is dlaunch.parallel.DataParallel
print("ours")
"""


def run(script: str, folder: Path) -> Any:
    (result,) = run_ranks(script, folder, launched=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_script_that_imports_torch_later_finds_ours_under_every_name(tmp_path: Path, way: str) -> None:
    before = f"""
import sys
from dlaunch.parallel.scripts import patch
patch.apply({way!r})
patch.apply({way!r})
assert "torch" not in sys.modules
"""
    assert run(before + NAMES + "assert not [f for f in sys.meta_path if 'dlaunch' in type(f).__module__]\n", tmp_path)


def test_a_worker_that_holds_torch_already_finds_ours_and_so_do_modules_that_took_torchs(tmp_path: Path) -> None:
    before = """
import sys, types, torch
library = types.ModuleType("library")
exec("from torch.nn.parallel import DistributedDataParallel as DDP; from torch.nn import DataParallel", vars(library))
sys.modules["library"] = library
torchs = library.DDP, library.DataParallel
from dlaunch.parallel.scripts import patch
patch.apply("ddp")
patch.apply("ddp")
"""
    after = """
assert library.DDP is ours and library.DataParallel is nn.DataParallel
assert issubclass(ours, torchs[0]) and issubclass(nn.DataParallel, torchs[1])
from torch.distributed.checkpoint.state_dict import get_model_state_dict
"""
    assert run(before + NAMES + after, tmp_path) == "ours\n"


def test_processes_that_a_script_starts_through_multiprocessing_find_ours_too(tmp_path: Path) -> None:
    script = """
import os
if __name__ == "__main__":
    os.environ["DLAUNCH_PARALLEL"] = "ddp"
    from dlaunch.parallel.scripts import patch
    patch.apply_as_asked()
import multiprocessing
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as Wrapper  # a name that nobody could guess

def child(rank, method):
    print(method, Wrapper.__module__, flush=True)

if __name__ == "__main__":
    mp.spawn(child, args=("spawn",))
    process = multiprocessing.get_context("forkserver").Process(target=child, args=(0, "forkserver"))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    ours = "dlaunch.parallel.ddp.distributed_data_parallel"
    assert run(script, tmp_path) == f"spawn {ours}\nforkserver {ours}\n"


def test_without_a_way_torch_keeps_its_classes_and_nothing_is_imported(tmp_path: Path) -> None:
    script = """
import sys
from dlaunch.parallel.scripts import patch
patch.apply("none")
assert not [name for name in sys.modules if name.startswith("torch")]
import torch
assert torch.nn.DataParallel.__module__ == "torch.nn.parallel.data_parallel"
assert torch.nn.parallel.DistributedDataParallel.__module__ == "torch.nn.parallel.distributed"
print("torch's")
"""
    assert run(script, tmp_path) == "torch's\n"


def test_a_failed_import_of_torch_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    script = """
from dlaunch.parallel.scripts import patch
patch.apply("ddp")
try:
    import torch
except ImportError as error:
    print(error)
"""
    assert run(script, tmp_path) == "broken\n"


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError):
        patch.apply("other")
