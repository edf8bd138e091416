"""Putting outputs together: order, types and gradients stay; disagreement is told, with the place."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlaunch.parallel.dp.gather import gather

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: Tensor
    steps: int


def test_nested_outputs_are_put_together_in_the_order_of_the_replicas() -> None:
    outputs = [
        {"pair": Pair(torch.tensor([index]), [torch.tensor([[index]])]), "none": None, "name": "x"}
        for index in range(3)
    ]
    result = gather(outputs, CPU)
    assert isinstance(result["pair"], Pair) and result["pair"].left.tolist() == [0, 1, 2]
    assert result["pair"].right[0].tolist() == [[0], [1], [2]] and result["none"] is None and result["name"] == "x"


def test_dictionaries_may_have_their_keys_in_another_order() -> None:
    result = gather(
        [{"a": torch.tensor([1]), "b": torch.tensor([2])}, {"b": torch.tensor([4]), "a": torch.tensor([3])}], CPU
    )
    assert result["a"].tolist() == [1, 3] and result["b"].tolist() == [2, 4]


def test_scalars_become_a_vector_with_one_entry_a_replica_and_torchs_warning() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        result = gather([Output(torch.tensor(1.0), 5), Output(torch.tensor(2.0), 5)], CPU)
    assert result.loss.tolist() == [1.0, 2.0] and result.steps == 5


def test_gradients_flow_back_to_each_replicas_output() -> None:
    outputs: Any = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    (gather(outputs, CPU) * torch.arange(5.0)).sum().backward()
    assert [output.grad.tolist() for output in outputs] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("outputs", "error", "text"),
    [
        ([{"a": 1}, {"b": 1}], ValueError, r"different keys at the output: \['a'\] and \['b'\]"),
        ([[1, 2], [1]], ValueError, r"different keys at the output: \[0, 1\] and \[0\]"),
        ([{"n": 1}, {"n": 2}], ValueError, r"different values at the output\['n'\]: \[1, 2\]"),
        ([(None,), (3,)], TypeError, r"returned NoneType and int at the output\[0\]"),
        ([torch.ones(1), 3], TypeError, r"returned Tensor and int at the output"),
        ([Pair(1, torch.ones(1)), Pair(1, None)], TypeError, r"Tensor at the output.right"),
    ],
)
def test_replicas_that_disagree_are_told_where(outputs: Any, error: Any, text: Any) -> None:
    with pytest.raises(error, match=text):
        gather(outputs, CPU)
