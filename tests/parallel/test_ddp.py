"""What users of torch's class rely on, one behaviour a test."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dlaunch.parallel import (
    DistributedDataParallel,
    MixedPrecision,
    PeriodicAverage,
    PostLocalSGDState,
    PowerSGDState,
    SyncBatchNorm,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    post_local_sgd_hook,
    power_sgd_hook,
)
from dlaunch.parallel.ddp.bucket import Bucket
from dlaunch.parallel.ddp.comm_hooks import bf16_compress_wrapper, fp16_compress_wrapper

from .ddp_models import Everything, batches
from .worlds import RankFailed, WorldOf


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def train(model: nn.Module, rank: int, size: int, steps: int = 5, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches(steps, 4 * size):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs[rank::size]), targets[rank::size])
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def flats_of(model: DistributedDataParallel) -> set[int]:
    return {bucket.flat.untyped_storage().data_ptr() for bucket in model.reducer.buckets if isinstance(bucket, Bucket)}


def gradient_storages(model: nn.Module) -> set[int]:
    return {gradient_of(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}


def all_equal(tensor: Tensor) -> bool:
    """Whether all ranks of the world hold the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.detach().contiguous())
    return all(torch.equal(everyone[0], other) for other in everyone)


# State


def start_from_rank_0(rank: int) -> None:
    torch.manual_seed(rank)
    network = Everything()
    network.norm.get_buffer("running_mean").add_(rank)
    model = DistributedDataParallel(network)
    for name, value in model.state_dict().items():
        assert name.startswith("module.")
        assert value.numel() == 0 or all_equal(torch.view_as_real(value) if value.is_complex() else value), name
    model.load_state_dict({f"module.{name}": value for name, value in Everything().state_dict().items()})


def test_ranks_start_from_the_state_of_rank_0_under_torchs_names(world_of: WorldOf) -> None:
    world_of(3).run(start_from_rank_0)


def copies_train_on(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(two_layers())
    train(model, rank, 2, steps=1)
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        train(other, rank, 2, steps=2)
    train(model, rank, 2, steps=2)
    for other in (copied, pickled):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine is not theirs


def test_a_copied_or_pickled_wrapper_trains_as_the_first_one(world_of: WorldOf) -> None:
    world_of(2).run(copies_train_on)


def test_buffers_are_those_of_rank_0_in_the_forward(world_of: WorldOf) -> None:
    assert world_of(2).run(statistics_seen, True) == [[10.0, 10.0], [10.0, 10.0]]
    assert world_of(2).run(statistics_seen, False) == [[10.0, 10.0], [11.0, 11.0]]


class ShowsBuffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor([value, value]))

    def forward(self) -> Tensor:
        return self.weight * self.get_buffer("seen")


def statistics_seen(rank: int, sync: bool) -> list[float]:
    network = ShowsBuffer(1.0)
    model = DistributedDataParallel(network, forward_sync_buffers=sync)
    network.get_buffer("seen").fill_(10 + rank)
    values: list[float] = model().tolist()
    return values


def count_with_hook(rank: int) -> list[float]:
    network = ShowsBuffer(rank + 1.0)
    model = DistributedDataParallel(network, broadcast_buffers=True)
    network.get_buffer("seen").fill_(rank + 1)
    model.register_buffer_hook(None, lambda _, buffers: dist.all_reduce(buffers["seen"], async_op=True).get_future())
    model()
    values: list[float] = network.get_buffer("seen").tolist()
    return values


def test_a_buffer_hook_replaces_the_broadcast(world_of: WorldOf) -> None:
    assert world_of(2).run(count_with_hook) == [[3.0, 3.0], [3.0, 3.0]]


def ignored_stay(rank: int) -> tuple[bool, bool]:
    torch.manual_seed(rank)
    network = two_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["2.weight"])
    model = DistributedDataParallel(network)
    torch.autograd.backward(model(torch.full((1, 6), float(rank + 1))).sum())
    return all_equal(network.get_parameter("2.weight")), all_equal(network.get_parameter("2.bias"))


def test_ignored_parameters_are_neither_broadcast_nor_averaged(world_of: WorldOf) -> None:
    assert world_of(2).run(ignored_stay) == [(False, True)] * 2


# Buckets


def bucket_story(rank: int) -> dict[str, Any]:
    network = nn.ModuleDict({"last": nn.Linear(6, 6), "first": nn.Linear(6, 6)})  # used against their order

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.layers["last"](self.layers["first"](inputs))
            return outputs

    model = DistributedDataParallel(Crossed(), bucket_cap_mb=0.00005)
    before = model.reducer.layout
    train(model, rank, 2, steps=2)
    names = [member.name for member in model.reducer.members]
    return {
        "before": [[names[index] for index in bucket] for bucket in before],
        "after": [[names[index] for index in bucket] for bucket in model.reducer.layout],
        "log": model._get_ddp_logging_data(),
    }


def test_buckets_are_rebuilt_in_the_order_of_the_first_backward(world_of: WorldOf) -> None:
    for story in world_of(2).run(bucket_story):
        first = [name for bucket in story["before"] for name in bucket]
        then = [name for bucket in story["after"] for name in bucket]
        assert first[0].startswith("layers.first")
        assert then[0].startswith("layers.last")
        assert story["log"]["has_rebuilt_buckets"] == 1
        assert story["log"]["world_size"] == 2
        assert story["log"]["iteration"] == 2
        assert story["log"]["avg_backward_compute_time"] > 0
        assert sum(map(int, story["log"]["rebuilt_bucket_sizes"].split(", "))) == 2 * 42 * 4


def gradients_are_views(rank: int) -> None:
    model = DistributedDataParallel(two_layers(), transport="torch")
    train(model, rank, 1, steps=2)
    assert gradient_storages(model) <= flats_of(model)
    apart = DistributedDataParallel(two_layers(), gradient_as_bucket_view=False)
    train(apart, rank, 1, steps=2)
    assert not gradient_storages(apart) & flats_of(apart)


def test_gradients_are_views_of_buckets_unless_told_otherwise(world_of: WorldOf) -> None:
    world_of(1).run(gradients_are_views)


def starts_before_the_end(rank: int) -> list[str]:
    story: list[str] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, inputs: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                inputs = layer(inputs)
                inputs.register_hook(partial(self.note, number))  # type: ignore[no-untyped-call]
            return inputs

        def note(self, number: int, _: Tensor) -> None:
            story.append(f"layer {number}")

    model = DistributedDataParallel(Watched(), bucket_cap_mb=0.0001)

    def hook(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
        story.append(f"bucket {bucket.index()}")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for inputs, _ in batches(2, 4):
        story.clear()
        torch.autograd.backward(model(inputs).sum())
    return story


def test_a_bucket_is_reduced_while_the_backward_goes_on(world_of: WorldOf) -> None:
    for story in world_of(2).run(starts_before_the_end):
        assert story == ["layer 2", "bucket 0", "layer 1", "bucket 1", "layer 0", "bucket 2"]


# Graphs


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            inputs = checkpoint(self.layer, inputs, use_reentrant=True)
        return inputs


def recompute_twice(rank: int, static_graph: bool) -> None:
    torch.manual_seed(0)
    network = Doubled()
    plain = copy.deepcopy(network)
    model = DistributedDataParallel(network, static_graph=static_graph)
    for inputs, _ in batches(3, 2):
        for each in (model, plain):
            each.zero_grad()
            torch.autograd.backward(each(inputs.clone().requires_grad_()).square().sum())
        assert torch.equal(gradient_of(network.layer.weight), gradient_of(plain.layer.weight))


def test_a_layer_checkpointed_twice_re_entrantly_needs_a_static_graph(world_of: WorldOf) -> None:
    world_of(2).run(recompute_twice, True)
    with pytest.raises(RankFailed, match=r"Expected to mark a variable ready only once.*layer.*static_graph=True"):
        world_of(2).run(recompute_twice, False)


def differentiate_inputs(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(two_layers())
    inputs = torch.full((1, 6), float(rank + 1), requires_grad=True)
    outputs = model(inputs)
    (penalty,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    torch.autograd.backward(outputs.sum() + penalty.square().sum())
    for parameter in model.parameters():
        assert parameter.grad is not None and all_equal(parameter.grad)


def test_gradients_of_inputs_do_not_disturb_the_reduction(world_of: WorldOf) -> None:
    world_of(2).run(differentiate_inputs)


def used_on_one_rank(rank: int, skip: bool) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, inputs: Tensor, which: int) -> tuple[Tensor, Tensor]:
            return self.layers[which](inputs), self.layers[2](inputs)

    network = Chooses()
    model = DistributedDataParallel(network, find_unused_parameters=True, skip_all_reduce_unused_params=skip)
    which = 0 if skip else rank
    for _ in range(2):
        model.zero_grad()
        outputs, _unused_by_the_loss = model(torch.ones(1, 2), which)
        torch.autograd.backward(outputs.sum())
    first, second, third = network.parameters()
    assert third.grad is None, "no rank used it: it stays as it was"
    assert gradient_of(first).tolist() == [[1.0 if skip else 0.5] * 2] * 2
    if not skip:
        assert gradient_of(second).tolist() == [[0.5] * 2] * 2


@pytest.mark.parametrize("skip", [False, True])
def test_unused_parameters_are_averaged_if_any_rank_used_them(world_of: WorldOf, skip: bool) -> None:
    world_of(2).run(used_on_one_rank, skip)


def delayed_is_averaged(rank: int) -> None:
    network = two_layers()
    model = DistributedDataParallel(
        network,
        delay_all_reduce_named_params=[("2.weight", network.get_parameter("2.weight"))],
        param_to_hook_all_reduce=network.get_parameter("0.weight"),
        bucket_cap_mb=0.00001,
    )
    assert model.reducer.members[model.reducer.layout[-1][-1]].name == "2.weight"
    torch.autograd.backward(model(torch.full((1, 6), float(rank + 1))).sum())
    assert all_equal(gradient_of(network.get_parameter("2.weight")))


def test_delayed_parameters_are_reduced_last(world_of: WorldOf) -> None:
    world_of(2).run(delayed_is_averaged)


def compiled(rank: int, wrap_first: bool) -> None:
    torch.manual_seed(0)
    network = two_layers()
    plain = copy.deepcopy(network)
    if wrap_first:
        model: Any = torch.compile(DistributedDataParallel(network), backend="aot_eager")
    else:
        network.compile(backend="aot_eager")
        model = DistributedDataParallel(network)
    train(model, rank, 2)
    train(DistributedDataParallel(plain), rank, 2)
    for mine, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert all_equal(mine)


@pytest.mark.parametrize("wrap_first", [False, True])
def test_a_compiled_module_trains_as_a_plain_one(world_of: WorldOf, wrap_first: bool) -> None:
    world_of(2).run(compiled, wrap_first)


# Precision and hooks


def close_to_exact(rank: int, variant: str) -> float:
    torch.manual_seed(0)
    network = two_layers()
    twin = copy.deepcopy(network)
    policy = MixedPrecision(param_dtype=torch.bfloat16) if variant == "bfloat16" else None
    if variant == "reduce":
        policy = MixedPrecision(reduce_dtype=torch.float16)
    model = DistributedDataParallel(network, mixed_precision=policy)
    hooks: dict[str, tuple[Any, Any]] = {
        "fp16 hook": (None, fp16_compress_hook),
        "bf16 hook": (None, bf16_compress_hook),
        "fp16 wrapper": (None, fp16_compress_wrapper(allreduce_hook)),
        "bf16 wrapper": (None, bf16_compress_wrapper(allreduce_hook)),
        "power sgd": (PowerSGDState(start_step=2, rank=4, min_compression_rate=0.5), power_sgd_hook),
    }
    if variant in hooks:
        model.register_comm_hook(*hooks[variant])
    if variant == "autocast":
        network.forward = torch.autocast("cpu", torch.bfloat16)(network.forward)  # type: ignore[method-assign]
    losses = train(model, rank, 2, steps=12)
    exact = train(DistributedDataParallel(twin), rank, 2, steps=12)
    for parameter in network.parameters():
        assert parameter.dtype == gradient_of(parameter).dtype == torch.float32
        assert all_equal(parameter), "ranks drifted apart"
    assert losses != exact, "nothing was rounded: the variant was not in force"
    return max(abs(a - b) for a, b in zip(losses, exact, strict=True))


@pytest.mark.parametrize(
    "variant", ["bfloat16", "reduce", "autocast", "fp16 hook", "bf16 hook", "fp16 wrapper", "bf16 wrapper", "power sgd"]
)
def test_narrow_types_and_compression_stay_near_exact_training(world_of: WorldOf, variant: str) -> None:
    assert max(world_of(2).run(close_to_exact, variant)) < 0.02


def local_steps(rank: int) -> list[bool]:
    torch.manual_seed(0)
    model = DistributedDataParallel(two_layers())
    model.register_comm_hook(PostLocalSGDState(start_local_step=2), post_local_sgd_hook)
    average = PeriodicAverage(model.parameters(), period=3, warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alike = []
    for inputs, targets in batches(6, 8):
        optimizer.zero_grad()
        torch.autograd.backward(functional.mse_loss(model(inputs[rank::2]), targets[rank::2]))
        optimizer.step()
        average.step()
        alike.append(all_equal(next(model.parameters())))
    return alike


def test_post_local_sgd_drifts_between_averages_and_not_before(world_of: WorldOf) -> None:
    assert world_of(2).run(local_steps) == [[True, True, True, False, False, True]] * 2


def torchs_own_hooks(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    states: list[tuple[Any, Any]] = [
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ]
    for state, hook in states:
        model = DistributedDataParallel(two_layers())
        model.register_comm_hook(state, hook)
        train(model, rank, 2)
        for parameter in model.parameters():
            assert all_equal(parameter)


def test_torchs_communication_hooks_run_on_our_buckets(world_of: WorldOf) -> None:
    world_of(2).run(torchs_own_hooks)


# Uneven inputs


def uneven(rank: int, size: int, keep_divisor: bool, options: dict[str, Any]) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    model = DistributedDataParallel(network, **options)
    model.eval()  # the norm is there for its buffers, which are synchronised
    weight = network.get_parameter("0.weight")
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=keep_divisor):
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
    return weight.flatten().tolist(), all_equal(weight)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ranks_with_fewer_inputs_mirror_the_others_to_the_end(world_of: WorldOf, options: dict[str, Any]) -> None:
    # Three ranks take 1, 3 and 5 steps; each rank's gradient is 1 (over sqrt(1 + eps) of the norm).
    for (weight,), alike in world_of(3).run(uneven, 3, True, options):
        assert weight == pytest.approx(1 - (3 + 2 * 2 + 2 * 1) / 3, abs=1e-4)
        assert alike
    for (weight,), alike in world_of(3).run(uneven, 3, False, options):
        assert weight == pytest.approx(1 - 5, abs=1e-4)
        assert alike


def throws_early(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                torch.autograd.backward(model(torch.ones(1, 1)).sum())
    except RuntimeError as error:
        return str(error)
    return ""


def test_join_can_raise_on_all_ranks_when_one_has_finished(world_of: WorldOf) -> None:
    for message in world_of(2).run(throws_early):
        assert "exhausted" in message


# SyncBatchNorm


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(6, 4, 1), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 6))


def train_normed(model: nn.Module, share: slice, rows: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(4, rows):
        optimizer.zero_grad()
        pairs = torch.stack([inputs, inputs.square()], dim=2)
        torch.autograd.backward(functional.mse_loss(model(pairs[share]), targets[share]))
        optimizer.step()


def normalise_together(rank: int, size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = SyncBatchNorm.convert_sync_batchnorm(normed())
    train_normed(DistributedDataParallel(network, bucket_cap_mb=0.0001), slice(rank, None, size), 4 * size)
    network.eval()
    network(torch.ones(1, 6, 2))  # alone: no collective
    return {name: value.detach() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_synchronised_batch_norm_is_batch_norm_over_the_batches_of_all_ranks(world_of: WorldOf, size: int) -> None:
    torch.manual_seed(0)
    plain = normed()
    train_normed(plain, slice(None), 4 * size)
    for state in world_of(size).run(normalise_together, size):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def sync_a_backward_whose_forward_did_not(rank: int, size: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 1, bias=False)
    model = DistributedDataParallel(linear)
    with model.no_sync():
        loss = model(torch.full((1, 3), float(rank))).sum()
    model.require_backward_grad_sync = True
    model.reducer.prepare_for_backward([])
    loss.backward()
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad, torch.full((1, 3), (size - 1) / 2))


def test_a_backward_can_be_announced_to_the_reducer_as_accelerate_does(world_of: WorldOf) -> None:
    world_of(2).run(sync_a_backward_whose_forward_did_not, 2)
