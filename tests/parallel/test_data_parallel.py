"""DataParallel on CPU devices: it computes what the plain module does, with torch's surface."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from dlaunch.parallel.dp.data_parallel import DataParallel, data_parallel


class Model(nn.Module):
    """Convolution, embedding, tied weights and a branch; nested inputs and outputs."""

    def __init__(self, features: Any = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, features)
        self.hidden = nn.Linear(features, features)
        self.output = nn.Linear(features, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, batch: Any, *, scale: Any = 1.0, detail: Any = False) -> Any:
        hidden = functional.gelu(self.hidden(self.embedding(batch["tokens"]))) * batch["weight"][:, None] * scale
        logits = self.output(hidden)
        return {"logits": logits, "hidden": (hidden,)} if detail else logits


def make_batch(size: Any, seed: Any = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(10, (size,), generator=generator),
        "weight": torch.rand(size, generator=generator, dtype=torch.float64),
    }


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 17),
    devices=st.integers(1, 5),
    features=st.integers(1, 6),
    seed=st.integers(0, 1000),
    detail=st.booleans(),
    scale=st.sampled_from([1.0, -0.5]),
)
def test_outputs_and_gradients_are_those_of_the_plain_module(
    size: Any, devices: Any, features: Any, seed: Any, detail: Any, scale: Any
) -> None:
    torch.manual_seed(seed)
    plain = Model(features).double()
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * devices)
    batch = make_batch(size, seed)
    outputs = [model(batch, scale=scale, detail=detail) for model in (plain, parallel)]
    if detail:
        torch.testing.assert_close(outputs[1]["hidden"][0], outputs[0]["hidden"][0])
        outputs = [output["logits"] for output in outputs]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().mean().backward()
    for expected, parameter in zip(plain.parameters(), parallel.module.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_training_moves_the_parameters_as_the_plain_module_does() -> None:
    torch.manual_seed(0)
    plain = Model().double()
    parallel = DataParallel(copy.deepcopy(plain), ["cpu"] * 2)
    for model in (plain, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(10):
            optimizer.zero_grad()
            batch = make_batch(7, step)
            loss: Any = functional.cross_entropy(model(batch), batch["tokens"])
            loss.backward()
            optimizer.step()
    for expected, value in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(value, expected)


def test_the_first_replicas_running_statistics_are_kept() -> None:
    torch.manual_seed(0)
    plain: Any = nn.BatchNorm1d(3)
    inputs = torch.randn(8, 3)
    parallel: Any = DataParallel(copy.deepcopy(plain), ["cpu", "cpu"])
    parallel(inputs)
    plain(inputs[:4])
    assert torch.equal(parallel.module.running_mean, plain.running_mean)
    assert parallel.module.num_batches_tracked.item() == 1


def test_the_signature_and_the_methods_are_torchs() -> None:
    for name in ("__init__", "forward", "scatter", "replicate", "parallel_apply", "gather"):
        ours, torchs = (inspect.signature(getattr(cls, name)) for cls in (DataParallel, nn.DataParallel))
        assert list(ours.parameters) == list(torchs.parameters), name
        assert name in vars(DataParallel), f"{name} would run torch's"
    assert {name for name in vars(nn.DataParallel) if inspect.isfunction(getattr(nn.DataParallel, name))} <= set(
        vars(DataParallel)
    )
    assert list(inspect.signature(data_parallel).parameters) == list(
        inspect.signature(nn.parallel.data_parallel).parameters
    )


def test_it_is_torchs_class_and_its_state_dict_goes_both_ways() -> None:
    parallel = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    torchs = nn.DataParallel(nn.Linear(2, 2))
    assert isinstance(parallel, nn.DataParallel)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]
    torchs.load_state_dict(parallel.state_dict())
    assert torch.equal(torchs.module.weight, parallel.module.weight)


def test_it_can_be_copied_and_pickled() -> None:
    parallel = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    inputs = torch.ones(4, 2)
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert torch.equal(twin(inputs), parallel(inputs)) and twin.module is not parallel.module


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without accelerators")
@pytest.mark.parametrize("device_ids", [None, [0], [0, 1]])
def test_without_accelerators_indices_mean_nothing_and_the_module_runs_as_it_is(device_ids: Any) -> None:
    parallel = DataParallel(nn.Linear(2, 2), device_ids)
    inputs = torch.ones(4, 2)
    assert parallel.device_ids == [] and torch.equal(parallel(inputs), parallel.module(inputs))


def test_a_module_that_is_not_on_the_first_device_is_refused() -> None:
    parallel = DataParallel(nn.Linear(2, 2, device="meta"), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cpu"):
        parallel(torch.ones(4, 2))


def test_a_module_without_inputs_runs_once() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(3))

        def forward(self) -> Any:
            return self.value * 2

    assert DataParallel(Constant(), ["cpu"] * 3)().tolist() == [2.0] * 3


def test_modes_of_the_caller_hold_in_the_replicas() -> None:
    parallel = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(torch.ones(4, 2)).dtype is torch.bfloat16
    with torch.no_grad():
        assert not parallel(torch.ones(4, 2)).requires_grad
    with torch.inference_mode():
        assert parallel(torch.ones(4, 2)).is_inference()


def test_an_error_in_a_replica_is_raised_with_its_index_and_type() -> None:
    class Picky(nn.Module):
        def forward(self, inputs: Any) -> Any:
            if (inputs > 2).any():
                raise ArithmeticError("too large")
            return inputs

    with pytest.raises(ArithmeticError, match=r"too large \(in replica 1 on device cpu\)"):
        DataParallel(Picky(), ["cpu"] * 2)(torch.arange(4.0))


def test_the_batch_dimension_can_be_another() -> None:
    parallel = DataParallel(nn.Linear(2, 2), ["cpu"] * 2, dim=1)
    inputs = torch.randn(3, 5, 2)
    torch.testing.assert_close(parallel(inputs), parallel.module(inputs))


def test_a_subclass_may_scatter_in_its_own_way() -> None:
    class Unbalanced(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return ((inputs[0][:1],), (inputs[0][1:],)), ({}, {})

    parallel = Unbalanced(nn.Linear(2, 2), ["cpu"] * 2)
    inputs = torch.randn(5, 2)
    torch.testing.assert_close(parallel(inputs), parallel.module(inputs))


def test_the_functional_form_computes_the_same() -> None:
    module, inputs = nn.Bilinear(2, 2, 3), torch.randn(5, 2)
    expected = module(inputs, inputs)
    torch.testing.assert_close(data_parallel(module, (inputs, inputs), ["cpu"] * 2), expected)
    torch.testing.assert_close(data_parallel(module, inputs, ["cpu"] * 2, module_kwargs={"input2": inputs}), expected)
