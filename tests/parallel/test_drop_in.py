"""Scripts written for torch's classes, run with ours under torch's names, and with torch's: the same numbers.

The examples have the shapes of torch's documents, in our words. With ours they are one job of the launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlaunch.parallel.scripts import patch

from . import ddp_examples
from .programs import ROOT
from .worlds import World, WorldOf

Results = list[dict[str, Any]]
DIFFERENT = {"join_with_a_sharded_optimizer", "synchronised_batch_norm"}  # where ours does what torch's does not
NAMES = [example.__name__ for example in ddp_examples.EXAMPLES]


@pytest.fixture(scope="module")
def both(world_of: WorldOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """What the examples came to on each rank: with torch's class, and under ``dlaunch --parallel ddp``."""
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    script = str(Path(ddp_examples.__file__))
    command = [sys.executable, "-m", "dlaunch", "--nproc-per-node", "2", "--parallel", "ddp", script, str(ours)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        torchs = world_of(2).run(ddp_examples.run, str(theirs))
        output, _ = job.communicate(timeout=100)
    finally:
        job.terminate()
    assert job.returncode == 0, output
    return torchs, [torch.load(ours / f"{rank}.pt", weights_only=False) for rank in range(2)]


def flat(found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in found.items():
        result |= flat(value, f"{prefix}{name}: ") if isinstance(value, dict) else {prefix + name: value}
    return result


def test_the_flag_puts_ours_in_the_place_of_torchs(both: tuple[Results, Results]) -> None:
    theirs, ours = ([rank["home of the class"] for rank in results] for results in both)
    assert theirs == ["torch"] * 2 and ours == ["dlaunch"] * 2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DIFFERENT])
def test_a_documented_way_to_use_ddp_ends_with_the_same_bits(both: tuple[Results, Results], name: str) -> None:
    for theirs, ours in zip(*both, strict=True):
        expected, found = flat(theirs[name]), flat(ours[name])
        assert found.keys() == expected.keys() and "raised" not in expected
        assert any(isinstance(value, Tensor) for value in expected.values())
        for what, value in expected.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(found[what], value, rtol=0, atol=0, msg=f"{what} differs")
            else:
                assert found[what] == value, what


def test_a_rank_that_has_joined_steps_its_part_of_a_sharded_optimizer_with_the_others_gradients(
    both: tuple[Results, Results],
) -> None:
    """torch 2.13 lets it step with the gradients of its own last iteration again."""
    torch.manual_seed(0)
    network = ddp_examples.ToyModel()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(100 * step + rank)
            inputs, targets = torch.randn(20, 10), torch.randn(20, 5)
            if step < 2 + rank:  # rank 0 has two batches, rank 1 has three
                torch.autograd.backward(nn.functional.mse_loss(network(inputs), targets) / 2)
        optimizer.step()
    for ours in both[1]:
        for name, value in network.state_dict().items():
            torch.testing.assert_close(ours["join_with_a_sharded_optimizer"][f"module.{name}"], value)


def test_synchronised_batch_norm_is_wrapped_on_cpus_too(both: tuple[Results, Results]) -> None:
    (theirs, ours), _ = ([rank["synchronised_batch_norm"] for rank in ranks] for ranks in zip(*both, strict=True))
    assert "SyncBatchNorm layers only work with GPU modules" in theirs["raised"]
    assert ours["kinds"] == ["Linear", "SyncBatchNorm", "Linear"]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).eval()
    torch.testing.assert_close(ours["output"], plain(torch.ones(2, 10)).detach())


def data_parallel_tutorial(_: int, ours: bool) -> list[Any]:
    from torch.utils.data import DataLoader, TensorDataset

    if ours:
        patch.apply("dp")
    found: list[Any] = []
    for wrap in (nn.DataParallel, nn.parallel.DataParallel):
        torch.manual_seed(0)
        model: Any = wrap(nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (inputs,) in DataLoader(TensorDataset(torch.randn(30, 5)), batch_size=10):
            optimizer.zero_grad()
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()
        assert isinstance(model, wrap)
        found += [type(model).__module__.partition(".")[0], list(model.state_dict()), model.module.weight.detach()]
    return found


def test_the_data_parallel_tutorial_trains_to_the_same_parameters(world_of: WorldOf) -> None:
    (theirs,) = world_of(1).run(data_parallel_tutorial, False)
    world = World(1)  # of its own: it is patched for good
    try:
        (ours,) = world.run(data_parallel_tutorial, True)
    finally:
        world.close()
    assert theirs[0::3] == ["torch"] * 2 and ours[0::3] == ["dlaunch"] * 2
    assert ours[1::3] == theirs[1::3] == [["module.weight", "module.bias"]] * 2
    for mine, expected in zip(ours[2::3], theirs[2::3], strict=True):
        assert torch.equal(mine, expected)
