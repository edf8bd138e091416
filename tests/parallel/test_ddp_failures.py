"""Mistakes and deaths: an error that says what happened, and nothing left half done."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlaunch.parallel import CollectiveError, DistributedDataParallel, PeerLost

from .ddp_models import batches
from .programs import run_ranks
from .worlds import RankFailed, World, WorldOf


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def leave_one_out(rank: int) -> str:
    network = layers()
    model = DistributedDataParallel(network)

    def forward(inputs: Tensor) -> Tensor:
        outputs: Tensor = network[0](inputs)
        return outputs

    network.forward = forward  # type: ignore[method-assign]
    torch.autograd.backward(model(torch.ones(1, 6)).sum())
    try:
        model(torch.ones(1, 6))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_that_never_came_is_named_at_the_next_forward(world_of: WorldOf) -> None:
    for rank, message in enumerate(world_of(2).run(leave_one_out)):
        assert message.startswith(
            "Expected to have finished reduction in the prior iteration before starting a new one."
        )
        assert f"did not receive grad for rank {rank}: 1.weight, 1.bias." in message
        assert "find_unused_parameters=True" in message


def leave_one_out_on_rank_1(rank: int) -> str:
    network = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = network[0](inputs)
            return outputs if rank == 1 else network[1](outputs)

    model = DistributedDataParallel(Uneven(), transport="shared_memory")
    try:
        for _ in range(2):
            torch.autograd.backward(model(torch.ones(1, 6)).sum())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_whose_graph_differs_does_not_leave_the_others_waiting(world_of: WorldOf) -> None:
    waiting, different = world_of(2).run(leave_one_out_on_rank_1)
    assert "Rank 0 could not reduce bucket 0 (layers.1.bias" in waiting
    assert "rank 1 gave up" in waiting
    assert "did not receive grad for rank 1: layers.1.weight, layers.1.bias" in different


def come_late(rank: int, came: str) -> str:
    model = DistributedDataParallel(layers(), transport="shared_memory")
    outputs = model(torch.ones(1, 6))
    if rank == 1:
        while not Path(came).exists():  # rank 0 has given up
            time.sleep(0.05)
    try:
        torch.autograd.backward(outputs.sum())
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Path(came).touch()
    return ""


def test_a_rank_that_lives_and_does_not_come_is_named_when_the_groups_time_is_up(tmp_path: Path) -> None:
    world = World(2, collective_timeout_s=1)
    try:
        waiting, late = world.run(come_late, f"{tmp_path}/came")
    finally:
        world.close()
    assert waiting.startswith("CollectiveTimeout: ") and "rank 1 did not come within 1 s" in waiting
    assert late.startswith("PeerLost: ") and "rank 0 gave up" in late


def wait_for_one_that_gave_up(rank: int) -> tuple[str, float]:
    model = DistributedDataParallel(layers(), transport="torch")
    outputs = model(torch.ones(1, 6))
    if rank == 1:
        model.reducer.communication.give_up()  # it lives, and its connections stay open
        return "", 0.0
    began = time.monotonic()
    try:
        torch.autograd.backward(outputs.sum())
    except PeerLost as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_over_gloo_a_rank_that_gave_up_is_not_waited_for() -> None:
    world = World(2, collective_timeout_s=60)
    try:
        (message, waited_s), _ = world.run(wait_for_one_that_gave_up)
    finally:
        world.close()
    assert "Rank 0 could not reduce bucket 0" in message and "rank 1 gave up" in message
    assert waited_s < 30


MISTAKES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "device_ids can only be None or contain a single element", {"device_ids": [0, 1]}),
    (ValueError, "only work with single-device/multiple-device GPU modules", {"device_ids": [0]}),
    (ValueError, "need to be set at the same time", {"delay_all_reduce_named_params": []}),
    (RuntimeError, "Cannot specify both process_group and device_mesh", {"device_mesh": object()}),
    (ValueError, "transport is one of auto, torch, shared_memory, not 'pigeon'", {"transport": "pigeon"}),
]


def make_mistakes(rank: int) -> None:
    for kind, text, arguments in MISTAKES:
        group = dist.group.WORLD if "device_mesh" in arguments else None
        with pytest.raises(kind, match=text):
            DistributedDataParallel(layers(), process_group=group, **arguments)
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(RuntimeError, match=r"uninitialized parameters.*weight"):
        DistributedDataParallel(nn.LazyLinear(3))
    model = DistributedDataParallel(layers())
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


def test_wrong_arguments_are_refused_in_torchs_words(world_of: WorldOf) -> None:
    world_of(1).run(make_mistakes)


def lose_a_peer(rank: int, transport: str) -> list[Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    model = DistributedDataParallel(network, transport=transport, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, size: int, dies: bool = False) -> None:
        inputs, targets = batches(4, 12)[number]
        optimizer.zero_grad()
        outputs = model(inputs[rank::size])
        if dies:  # after the last layers' buckets have started, before the first layers'
            network.get_parameter("1.weight").register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: os.kill(os.getpid(), signal.SIGKILL)
            )
        torch.autograd.backward((outputs - targets[rank::size]).square().mean())
        optimizer.step()

    step(0, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(PeerLost, match=rf"Rank {rank} could not reduce bucket \d+ \(\d\.\w+.*Parameters are unch"):
        step(1, 3, dies=rank == 2)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)
    optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(PeerLost, match=r"gradients are invalid.*rebuild\(process_group\)"):
        model(batches(1, 1)[0][0])
    model.rebuild(dist.new_group([0, 1], use_local_synchronization=True))
    step(1, 2)
    step(2, 2)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_survivors_of_a_death_in_mid_backward_keep_their_parameters_and_go_on(transport: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for inputs, targets in batches(4, 12)[:3]:
        optimizer.zero_grad()
        torch.autograd.backward((network(inputs) - targets).square().mean())
        optimizer.step()
    world = World(3)
    try:
        world.start(lose_a_peer, transport)
        for rank in (0, 1):
            for mine, expected in zip(world.result(rank), network.parameters(), strict=True):
                torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=1e-5)
        with pytest.raises(RankFailed, match="rank 2 died"):
            world.result(2)
    finally:
        world.close()


def reduce_for_ever(rank: int, started: str) -> tuple[float, str]:
    model = DistributedDataParallel(nn.Linear(1500, 2000, bias=False), transport="shared_memory")
    for number in range(1_000_000):
        try:
            torch.autograd.backward(model(torch.ones(1, 1500)).sum())
        except CollectiveError as error:
            return time.monotonic(), str(error)
        if number == 3:
            Path(f"{started}{rank}").touch()
    return 0.0, "nothing failed"


@pytest.mark.parametrize("seed", range(4))
def test_a_death_at_any_moment_of_a_reduction_in_shared_memory_is_noticed(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    world = World(3)
    try:
        world.start(reduce_for_ever, f"{tmp_path}/started")
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(chance.random() / 50)
        victim = chance.randrange(3)
        world.kill(victim)
        killed = time.monotonic()
        for rank in {0, 1, 2} - {victim}:
            noticed, message = world.result(rank)
            assert f"rank {victim} (process {world.processes[victim].pid}) has died" in message or "gave up" in message
            print(f"noticed after {noticed - killed:.3f} s")
    finally:
        world.close()
    assert not [path for path in Path("/dev/shm").iterdir() if "dlaunch" in path.name]


def mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def map_and_drop(rank: int) -> tuple[int, int]:
    gc.collect()
    before = mapped("memfd:dlaunch-ddp")
    model = DistributedDataParallel(layers(), transport="shared_memory")
    for inputs, _ in batches(3, 4):
        torch.autograd.backward(model(inputs).sum())
    during = mapped("memfd:dlaunch-ddp") - before
    del model
    gc.collect()
    return during, mapped("memfd:dlaunch-ddp") - before


def test_shared_memory_goes_with_the_model(world_of: WorldOf) -> None:
    assert world_of(2).run(map_and_drop) == [(2, 0)] * 2


def test_distributed_autograd_whose_gradients_would_never_be_averaged_is_refused(tmp_path: Path) -> None:
    script = """
import os, torch
import torch.distributed as dist
from torch.distributed import autograd, rpc
from dlaunch.parallel import DistributedDataParallel

dist.init_process_group("gloo")
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/meeting")
rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
torch.autograd.backward(model(torch.ones(1, 3)).sum())
try:
    with autograd.context():
        model(torch.ones(1, 3))
except RuntimeError as error:
    print(error)
rpc.shutdown()
"""
    (result,) = run_ranks(script, tmp_path)
    assert "cannot average gradients of torch.distributed.autograd" in result.stdout, result.stderr
