"""What users rely on, one behaviour a test: evaluation, several forwards, freeing, offload, data types, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlaunch.parallel.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.state import full_state_dict
from dlaunch.parallel.fsdp.unit import State

from ..worlds import RankFailed, WorldOf
from .fsdp_models import OPTIMIZERS, Net, assert_same, batches, net, shard_blocks, train, train_alone

TRANSPORTS = ("torch", "flat", "shared_memory")


def states(model: Net) -> list[State]:
    return [unit_of(module).state for module in model.modules() if isinstance(module, FSDPModule)]


def evaluates_like_the_plain_model(rank: int, transport: str) -> None:
    plain, sharded = net(), shard_blocks(net(), transport=transport)
    optimizer, theirs = (OPTIMIZERS["adam"](model.parameters()) for model in (sharded, plain))
    tokens, _ = batches(1, 8)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(sharded(tokens), plain(tokens))
            assert set(states(sharded)) == {State.SHARDED}
    plain.eval(), sharded.eval()
    assert torch.equal(sharded(tokens), plain(tokens))  # with a graph that no backward uses
    expected = train_alone(plain, theirs, 2, steps=3)
    for number, (inputs, targets) in enumerate(batches(3, 8)):
        with torch.no_grad():
            sharded(inputs)  # between steps, and between forward and backward
        optimizer.zero_grad()
        result = functional.cross_entropy(sharded(inputs[rank::2]), targets[rank::2])
        with torch.no_grad():
            sharded(inputs)
        torch.autograd.backward(result)
        optimizer.step()
        assert result.item() == expected[rank][number]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_evaluation_anywhere_disturbs_nothing(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(evaluates_like_the_plain_model, transport)


def several_forwards(rank: int, transport: str) -> None:
    plain, sharded = net(), shard_blocks(net(), transport=transport)
    tokens, targets = batches(1, 16)[0]
    for model, rows in ((plain, None), (sharded, rank)):
        for part in range(2) if rows is None else [rows]:
            one, two = tokens[part::2][:4], tokens[part::2][4:]
            first = functional.cross_entropy(model(one), targets[:4])
            second = functional.cross_entropy(model(two), targets[4:8])
            torch.autograd.backward(first + second)
    averaged = [parameter.grad / 2 for parameter in plain.parameters() if parameter.grad is not None]
    for parameter, average in zip(sharded.parameters(), averaged, strict=True):
        begin, end = rows_of_rank(average, rank)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, average.reshape(average.shape or (1,))[begin:end])


def rows_of_rank(whole: Tensor, rank: int) -> tuple[int, int]:
    rows = whole.shape[0] if whole.dim() else 1
    half = -(-rows // 2)
    return min(rank * half, rows), min((rank + 1) * half, rows)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_forwards_before_one_backward_are_one_reduction(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(several_forwards, transport)


def frees_when_promised(rank: int) -> None:
    model = shard_blocks(net(), transport="torch")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    seen: list[list[State]] = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: seen.append(states(model)[1:]))
    for _ in range(2):
        seen.clear()
        train(model, optimizer, rank, 2, steps=1)
        assert set(states(model)) == {State.SHARDED}
    whole, coming, gone = State.WHOLE, State.GATHERING, State.SHARDED
    assert seen == [[whole, coming, gone], [gone, whole, coming], [gone, gone, whole]]
    held = [unit_of(block).memory.wholes[0].untyped_storage().nbytes() for block in model.blocks]  # type: ignore[union-attr]
    assert held == [0, 0, 0]


def test_one_unit_is_whole_and_one_is_coming_and_the_memory_of_others_is_given_back(world_of: WorldOf) -> None:
    world_of(2).run(frees_when_promised)


def unused_unit(rank: int, transport: str) -> None:
    model = net()
    extra = fully_shard(nn.Linear(3, 3), transport=transport)
    model.add_module("extra", extra)
    shard_blocks(model, transport=transport)
    before = extra.weight.detach().clone()
    train(model, OPTIMIZERS["adamw"](model.parameters()), rank, 2, steps=3)
    assert extra.weight.grad is None
    assert torch.equal(extra.weight, before)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_unit_that_never_runs_gets_no_gradient_and_holds_up_nobody(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(unused_unit, transport)


def used_on_one_rank(rank: int, transport: str) -> None:
    model = net(unused=True)
    shard_blocks(model, transport=transport)
    assert model.unused is not None
    out = model(torch.arange(8)).sum()
    if rank == 0:
        model.unshard()  # type: ignore[operator]
        out = out + model.unused(torch.ones(6)).sum()
    torch.autograd.backward(out)
    gradient = model.unused.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.full_like(gradient, 0.5))


@pytest.mark.parametrize("transport", ["torch", "flat"])
def test_a_parameter_that_one_rank_used_is_averaged_over_all(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(used_on_one_rank, transport)


def ignored(rank: int) -> None:
    model = net()
    kept = model.blocks[0].up.weight
    assert isinstance(kept, nn.Parameter)
    fully_shard(model, ignored_params=[kept])
    assert model.blocks[0].up.weight is kept
    assert kept.shape == (7, 6)
    torch.autograd.backward(model(torch.arange(8)).square().mean())
    assert kept.grad is not None
    assert kept.grad.shape == (7, 6)


def test_ignored_parameters_stay_whole(world_of: WorldOf) -> None:
    world_of(2).run(ignored)


def mixed(rank: int, transport: str) -> None:
    plain = net().bfloat16()
    model = net()
    for block in model.blocks:
        fully_shard(block, transport=transport, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    whole = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, transport=transport, mp_policy=whole)
    kinds: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda module, _, out: kinds.extend([module.weight.dtype, out.dtype]))
    tokens = torch.arange(8) % 11
    output = model(tokens)
    assert output.dtype is torch.float32
    assert kinds == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(output, plain(tokens).float(), rtol=2e-2, atol=2e-2)
    torch.autograd.backward(output.square().mean())
    assert all(p.dtype is torch.float32 and p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())
    losses = train(model, OPTIMIZERS["adam"](model.parameters()), rank, 2, steps=30)
    exact = net()
    expected = train_alone(exact, OPTIMIZERS["adam"](exact.parameters()), 2, steps=30)
    assert losses == pytest.approx(expected[rank], abs=0.1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mixed_precision_computes_narrow_and_keeps_wide(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(mixed, transport)


def half_sums(rank: int) -> None:
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16), transport="torch")
    torch.autograd.backward(model(torch.ones(1, 4)).sum() * (40000 if rank == 0 else 20000))
    # The sum of both is more than half precision can hold: it is divided first.
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 4), 30000.0))


def test_half_precision_sums_do_not_overflow(world_of: WorldOf) -> None:
    world_of(2).run(half_sums)


class Viewed(nn.Module):
    """Its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(hidden)))
        return result.view(-1, 2, 3)


def changed_in_place(rank: int) -> None:
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList([Viewed(), Viewed()])
        model = fully_shard_all(blocks) if sharded else list(blocks)
        hidden = torch.ones(4, 6)
        for block in model:
            hidden = block(hidden)
            hidden += 1
            hidden = hidden.reshape(-1, 6)
        torch.autograd.backward(hidden.square().sum())
        results.append([parameter.grad for parameter in blocks.parameters()])
    for ours, theirs in zip(*reversed(results), strict=True):
        assert ours is not None
        assert theirs is not None
        begin, end = rows_of_rank(theirs, rank)
        assert torch.equal(ours, theirs[begin:end])


def fully_shard_all(blocks: nn.ModuleList) -> list[nn.Module]:
    return [fully_shard(block, transport="torch", reshard_after_forward=True) for block in blocks]


def test_an_output_that_is_a_view_may_be_changed_in_place(world_of: WorldOf) -> None:
    world_of(2).run(changed_in_place)


def offloaded(rank: int, transport: str) -> None:
    plain, model = net(), shard_blocks(net(), transport=transport, offload_policy=CPUOffloadPolicy())
    expected = train_alone(plain, OPTIMIZERS["adam"](plain.parameters()), 2, steps=10)
    assert train(model, OPTIMIZERS["adam"](model.parameters()), rank, 2, steps=10) == expected[rank]
    memory = unit_of(model.blocks[0]).memory
    assert memory is not None
    assert memory.wholes[0].untyped_storage().nbytes() == 0  # a copy, which was freed: shards lie elsewhere


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_offloaded_shards_train_alike(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(offloaded, transport)


def compiled(rank: int, how: str) -> None:
    plain, model = net(), net()
    for block in model.blocks:
        if how == "in place":
            block.compile(backend="eager", fullgraph=True)
        else:
            block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        fully_shard(block)
    fully_shard(model)
    expected = train_alone(plain, OPTIMIZERS["sgd"](plain.parameters()), 2, steps=5)
    assert train(model, OPTIMIZERS["sgd"](model.parameters()), rank, 2, steps=5) == pytest.approx(expected[rank])


@pytest.mark.parametrize("how", ["in place", "its forward"])
def test_compiled_blocks_work_within_units(world_of: WorldOf, how: str) -> None:
    world_of(2).run(compiled, how)


def failing(rank: int) -> None:
    model = shard_blocks(net(), transport="torch")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    assert set(states(model)) == {State.SHARDED}
    output = model(torch.arange(8))
    output.register_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.backward(output.sum())
    plain = net()
    expected = train_alone(plain, OPTIMIZERS["sgd"](plain.parameters()), 2, steps=3)
    assert train(model, optimizer, rank, 2, steps=3) == expected[rank]


def _raise(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_forward_or_backward_that_raised_leaves_the_model_usable(world_of: WorldOf) -> None:
    world_of(2).run(failing)


# Errors


def says(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("it raised nothing")


def errors(rank: int) -> None:
    model = shard_blocks(net())
    inner = says(model.blocks[0].up, torch.ones(1, 6))
    assert "blocks.0.up.weight, blocks.0.up.bias is sharded" in inner
    assert "unit blocks.0" in inner
    model.blocks[1].up.weight.data = torch.zeros(7, 6)
    changed = says(model, torch.arange(4))
    assert "blocks.1.up.weight in unit blocks.1" in changed
    assert "(7, 6)" in changed
    other = shard_blocks(net())
    other(torch.arange(4))
    late = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "holds the whole of tokens.weight" in says(late.step)
    assert "sharded already" in says(fully_shard, model)
    assert "transport is one of" in says(lambda: fully_shard(nn.Linear(2, 2), transport="pigeon"))


def test_errors_name_the_parameter_and_its_unit(world_of: WorldOf) -> None:
    world_of(2).run(errors)


class Misuses(nn.Module):
    """Takes a parameter of another unit, one that it kept from before, or one that it kept while it was whole."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.what, self.kept = what, [self.second.weight]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.what == "freed":
            self.first.register_forward_pre_hook(lambda module, _: self.kept.append(module.weight))
        hidden = self.first(hidden)
        weight = self.second.weight if self.what == "rows" else self.kept[-1]
        assert weight.dim() == 2  # to ask about it is nothing wrong
        hidden = hidden.to(weight).type_as(weight) + weight.new_zeros(4)
        return functional.linear(hidden, weight=weight)


def misuses(rank: int) -> None:
    rows = f"rows {2 * rank} to {2 * rank + 2} of 4 on rank {rank}"
    said = {
        "rows": f"linear() was given second.weight of unit second, which has only {rows}",
        "kept": "linear() was given second.weight of unit second, as it was before fully_shard",
        "freed": "linear() was given first.weight of unit first, whole no more",
    }
    for what, expected in said.items():
        model = Misuses(what)
        for module in (model.first, model.second, model):
            fully_shard(module, transport="torch", reshard_after_forward=True)
        assert expected in says(model, torch.ones(1, 4))
        assert torch._C._len_torch_function_stack() == 0  # nobody looks any more, though the forward raised


def test_a_function_that_takes_rows_for_the_whole_is_told_the_parameter_and_its_unit(world_of: WorldOf) -> None:
    world_of(2).run(misuses)


class EitherWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor, left_first: bool) -> Tensor:
        first, second = (self.left, self.right) if left_first else (self.right, self.left)
        result: Tensor = second(first(hidden))
        return result


def other_order(rank: int) -> None:
    model = EitherWay()
    fully_shard(model.left), fully_shard(model.right), fully_shard(model)
    model(torch.ones(1, 4), rank == 0)


def test_ranks_that_run_units_in_another_order_are_told_which(world_of: WorldOf) -> None:
    with pytest.raises(RankFailed, match="rank 0 runs left, rank 1 runs right"):
        world_of(2).run(other_order)


def loads_and_saves(rank: int) -> None:
    plain, model = net(), shard_blocks(Net())
    model.load_state_dict(plain.state_dict())
    assert_same(full_state_dict(model, rank0_only=False), dict(plain.state_dict()), 0)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})  # its own shards
    doubled = {name: value * 2 for name, value in plain.state_dict().items()}
    assert_same(full_state_dict(model, rank0_only=False), doubled, 0)


def test_a_plain_state_dict_loads_into_shards_and_so_do_shards(world_of: WorldOf) -> None:
    world_of(2).run(loads_and_saves)
