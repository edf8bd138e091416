"""Cutting batches: every row arrives once, in order, and what cannot be cut alike is refused."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from dlaunch.parallel.dp.gather import gather
from dlaunch.parallel.dp.scatter import scatter

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    tokens: Tensor
    name: str


@given(size=st.integers(0, 40), devices=st.integers(1, 7), dim=st.sampled_from([0, 1, -1]))
def test_scattering_and_gathering_is_the_identity_for_every_size(size: Any, devices: Any, dim: Any) -> None:
    batch = torch.arange(size * 3).reshape((size, 3) if dim == 0 else (3, size))
    pieces = scatter(batch, [CPU] * devices, dim)
    assert 1 <= len(pieces) <= devices
    assert [piece.size(dim) for piece in pieces] == [piece.size(dim) for piece in batch.chunk(devices, dim)][
        : len(pieces)
    ]
    assert torch.equal(gather(pieces, CPU, dim), batch)


def test_nested_inputs_are_cut_everywhere_and_the_rest_is_shared() -> None:
    marker = object()
    inputs: Any = (
        Pair(torch.arange(4), [torch.arange(4) * 10]),
        {"batch": Batch(torch.arange(4), "n"), "other": marker},
        (),
    )
    first, second = scatter(inputs, [CPU, CPU])
    assert isinstance(first[0], Pair) and isinstance(second[1]["batch"], Batch) and first[2] == ()
    assert second[0].left.tolist() == [2, 3] and second[0].right[0].tolist() == [20, 30]
    assert first[1]["batch"].tokens.tolist() == [0, 1] and second[1]["batch"].name == "n"
    assert first[1]["other"] is second[1]["other"] is marker
    assert first[1] is not second[1] and inputs[1]["batch"].tokens.tolist() == [0, 1, 2, 3]


def test_a_batch_smaller_than_the_number_of_devices_uses_fewer() -> None:
    assert [len(piece) for piece in scatter(torch.ones(2, 5), [CPU] * 4)] == [1, 1]


def test_inputs_without_tensors_go_to_every_device() -> None:
    assert scatter((3, {"a": "b"}), [CPU] * 3) == [(3, {"a": "b"})] * 3


def test_a_tensor_without_dimensions_goes_to_every_device() -> None:
    pieces = scatter((torch.arange(4), torch.tensor(7)), [CPU, CPU])
    assert [piece[1].item() for piece in pieces] == [7, 7]


def test_gradients_flow_back_into_the_tensor_that_was_cut() -> None:
    batch = torch.ones(5, 2, requires_grad=True)
    pieces = scatter(batch, [CPU, CPU])
    (2 * pieces[0].sum() + 3 * pieces[1].sum()).backward()
    assert batch.grad is not None and batch.grad[:, 0].tolist() == [2, 2, 2, 3, 3]


def test_tensors_that_would_be_cut_into_different_numbers_of_pieces_are_refused_with_their_sizes() -> None:
    with pytest.raises(ValueError, match=r"sizes \[5, 8\] along dimension 0 would be cut into \[3, 4\] pieces"):
        scatter((torch.ones(5), torch.ones(8)), [CPU] * 4)


def test_a_tensor_without_the_batch_dimension_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) has no dimension 1"):
        scatter(torch.ones(3), [CPU, CPU], 1)


def test_a_packed_sequence_is_refused_with_what_to_do() -> None:
    packed = pack_padded_sequence(torch.ones(4, 2, 3), [4, 3])
    with pytest.raises(TypeError, match=r"pack it inside forward\(\)"):
        scatter((packed,), [CPU, CPU])
