"""Replicas compute with copies, and their gradients arrive in the original."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dlaunch.parallel.dp.replicate import replicate

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers that share one weight, a shared submodule, an empty slot and a counter."""

    count: Any

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.register_parameter("absent", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.nothing = None

    def forward(self, inputs: Any) -> Any:
        self.count += 1
        return self.again(self.second(self.first(inputs)))


def test_gradients_of_all_replicas_add_up_in_the_modules_parameters() -> None:
    module: Any = nn.Linear(3, 2)
    for index, replica in enumerate(replicate(module, [CPU] * 3)):
        (replica(torch.ones(1, 3)) * (index + 1)).sum().backward()
    assert module.weight.grad.tolist() == [[6.0] * 3] * 2 and module.bias.grad.tolist() == [6.0] * 2


def test_ties_among_parameters_and_modules_hold_inside_a_replica() -> None:
    module = Tied()
    for replica in replicate(module, [CPU, CPU]):
        assert replica.first.weight is replica.second.weight and replica.again is replica.first
        assert replica.first is not module.first and replica.absent is None
    assert len({id(replica.first) for replica in replicate(module, [CPU, CPU])}) == 2


def test_only_the_first_replicas_writes_in_place_reach_the_module() -> None:
    module: Any = Tied()
    for replica in replicate(module, [CPU] * 3):
        replica(torch.ones(1, 3))
    assert module.count.item() == 1
    second: Any = replicate(module, [CPU, CPU])[1]
    with torch.no_grad():
        second.first.weight.zero_()
    assert module.first.weight.abs().sum() > 0


def test_replicas_show_their_parameters_buffers_and_state() -> None:
    module = Tied().eval()
    for replica in replicate(module, [CPU, CPU]):
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in module.named_parameters()]
        assert not any(parameter.is_leaf for parameter in replica.parameters())
        assert replica.state_dict().keys() == module.state_dict().keys()
        assert not replica.training


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_replicas_are_plain_copies(context: Any) -> None:
    module = nn.Linear(2, 2)
    with context():
        for replica in replicate(module, [CPU, CPU]):
            assert not replica.weight.requires_grad and torch.equal(replica.weight, module.weight)
    assert not any(replica.weight.requires_grad for replica in replicate(module, [CPU, CPU], detach=True))


def test_frozen_parameters_and_buffers_with_gradients_keep_what_they_are() -> None:
    module: Any = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    module.register_buffer("scale", torch.ones(2, requires_grad=True))
    for replica in replicate(module, [CPU, CPU]):
        (replica(torch.ones(1, 2)) * replica.scale).sum().backward()
    assert module.weight.grad is None and module.bias.grad.tolist() == [2.0, 2.0]
    assert module.scale.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True),
        lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True),
        lambda: nn.MultiheadAttention(3, 1, batch_first=True),
    ],
)
def test_layers_with_state_of_their_own_train_as_the_original_does(make: Any) -> None:
    torch.manual_seed(0)
    module = make().double().eval()  # spectral norm moves its vectors in training only
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)

    def loss(callee: Any) -> Any:
        output = callee(inputs, inputs, inputs) if isinstance(callee, nn.MultiheadAttention) else callee(inputs)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    loss(module).backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    for replica in replicate(module, [CPU, CPU]):
        loss(replica).backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_parameter_lists_are_seen_by_replicas() -> None:
    module: Any = nn.Module()
    module.weights = nn.ParameterList([torch.ones(2), torch.ones(2)])
    module.named = nn.ParameterDict({"a": torch.ones(2)})
    for replica in replicate(module, [CPU, CPU]):
        (sum(replica.weights) * replica.named["a"]).sum().backward()
    assert module.weights[1].grad.tolist() == [2.0, 2.0] and module.named["a"].grad.tolist() == [4.0, 4.0]


def test_a_method_that_was_put_onto_the_module_runs_the_replica() -> None:
    module: Any = nn.Linear(2, 2)
    module.forward = MethodType(lambda self, inputs: (self, inputs), module)
    for replica in replicate(module, [CPU, CPU]):
        assert replica(torch.ones(1))[0] is replica


def compiled_inside() -> Any:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    return nn.Sequential(compiled)


def compiled_in_place() -> Any:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (compiled_in_place, "the module is compiled"),
        (compiled_inside, "^0 is compiled"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "^0 has uninitialized parameters: run one batch"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(make: Any, text: Any) -> None:
    with pytest.raises(TypeError, match=text):
        replicate(make(), [CPU, CPU])


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(TypeError, match="ScriptModule"):
        replicate(torch.jit.script(nn.Linear(2, 2)), [CPU, CPU])


def test_gradients_accumulate_over_backwards_without_sharing_storage() -> None:
    module: Any = nn.Module()
    module.left, module.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for _ in range(3):
        for replica in replicate(module, [CPU, CPU]):
            ((replica.left + replica.right) * torch.ones(2)).sum().backward()
    assert module.left.grad.tolist() == module.right.grad.tolist() == [6.0, 6.0]
    assert module.left.grad.data_ptr() != module.right.grad.data_ptr()
