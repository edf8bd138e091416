"""A prepared model is the script's own object, and only its call goes through the wrapper."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

from dlaunch.parallel.dp.data_parallel import DataParallel
from dlaunch.parallel.scripts.routed_module import route_through, wrapper_of


class Net(nn.Module):
    """Remembers which threads ran it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.threads: list[str] = []

    def forward(self, inputs: Any, depth: int = 0) -> Any:
        self.threads.append(threading.current_thread().name)
        hidden = self.linear(inputs)
        return self(hidden, depth - 1) if depth else hidden

    def predict(self, inputs: Any) -> Any:
        return self(inputs).argmax(-1)


def routed() -> Any:
    torch.manual_seed(0)
    return route_through(Net(), lambda module: DataParallel(module, ["cpu", "cpu"]))


def test_the_object_its_class_attributes_and_state_dict_stay() -> None:
    net = Net()
    keys = list(net.state_dict())
    same = route_through(net, lambda module: DataParallel(module, ["cpu", "cpu"]))
    assert same is net and isinstance(net, Net) and type(net).__name__ == "Net" and net.linear.in_features == 3
    assert list(net.state_dict()) == keys and [name for name, _ in net.named_modules()] == ["", "linear"]
    net.load_state_dict(Net().state_dict())


def test_calls_run_in_the_wrapper_and_calls_inside_it_do_not() -> None:
    net = routed()
    net(torch.ones(4, 3))
    assert len(net.threads) == 2 and all(name.startswith("replica") for name in net.threads)
    net.threads.clear()
    net(torch.ones(4, 3), depth=2)  # calls itself: each replica three times, and no wrapper inside
    assert len(net.threads) == 6


def test_methods_that_call_the_model_run_in_the_wrapper() -> None:
    net = routed()
    assert net.predict(torch.ones(4, 3)).shape == (4,) and len(net.threads) == 2


def test_an_error_inside_leaves_the_way_through_the_wrapper_open() -> None:
    net = routed()
    with pytest.raises(RuntimeError, match="in replica"):
        net(torch.ones(4, 5))
    net.threads.clear()
    net(torch.ones(4, 3))
    assert len(net.threads) == 2


def test_hooks_of_the_model_run_once_in_each_replica() -> None:
    net, calls = routed(), []
    net.register_forward_hook(lambda *_: calls.append(1))
    net(torch.ones(4, 3))
    assert len(calls) == 2


def test_the_wrapper_can_be_had_and_follows_train_and_eval() -> None:
    net, plain = routed(), Net()
    wrapper = wrapper_of(net)
    assert isinstance(wrapper, DataParallel) and wrapper.module is net and wrapper_of(plain) is plain
    net.eval()
    assert not wrapper.training and not net.linear.training
    net.train()
    assert wrapper.training


def test_copies_and_pickles_are_plain_modules() -> None:
    net = routed()
    twins = [copy.deepcopy(net), copy.copy(net)]
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    for twin in twins:
        assert type(twin) is Net and wrapper_of(twin) is twin
        twin.threads = []
        assert torch.equal(twin(torch.ones(1, 3)), net(torch.ones(1, 3)))
        assert twin.threads == [threading.current_thread().name]


def test_a_copy_of_a_model_that_holds_itself_holds_the_copy() -> None:
    net = routed()
    net.callback = net.predict
    twin = copy.deepcopy(net)
    assert twin.callback.__self__ is twin


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_call_computes_the_same() -> None:
    net = routed()
    compiled: Any = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(4, 3)), net(torch.ones(4, 3)))
