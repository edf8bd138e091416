"""What a checkpoint may hold, and how parameters are called in it."""

from __future__ import annotations

import enum
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dlaunch.parallel.checkpoint.error import CheckpointError
from dlaunch.parallel.checkpoint.manifest import Published
from dlaunch.parallel.checkpoint.names import plain_name, with_names_of, with_plain_names
from dlaunch.parallel.checkpoint.retention import Retention
from dlaunch.parallel.checkpoint.shards import assemble, shard
from dlaunch.parallel.checkpoint.state import snapshot


def written_and_read(tree: dict[str, Any]) -> dict[str, Any]:
    content = io.BytesIO()
    torch.save(snapshot(tree, copy=True), content)
    content.seek(0)
    read: dict[str, Any] = torch.load(content, weights_only=True)
    return read


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.Size([2, 3])]),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(KEYS, inner).map(OrderedDict),
        st.sets(st.integers()),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), TREES, max_size=3))
def test_every_tree_of_plain_values_comes_back_as_it_was(tree: dict[str, Any]) -> None:
    assert written_and_read(tree) == tree


class Colour(enum.IntEnum):
    RED = 1


class Name(str, enum.Enum):
    ANN = "ann"


def test_subclasses_of_plain_values_come_back_as_plain_values() -> None:
    numpy: Any = pytest.importorskip("numpy")
    read = written_and_read(
        {"enum": Colour.RED, "name": Name.ANN, "float": numpy.float64(1.5), "int": numpy.int32(4), "b": numpy.bool_(1)}
    )
    assert read == {"enum": 1, "name": "ann", "float": 1.5, "int": 4, "b": True}
    assert [type(value) for value in read.values()] == [int, str, float, int, bool]


def test_tensors_of_every_kind_come_back_with_dtype_and_values() -> None:
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)
    }
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.0), "transposed": torch.arange(6).reshape(2, 3).T}
    tensors |= {"sparse": torch.eye(3).to_sparse(), "parameter": nn.Parameter(torch.ones(2))}
    read = written_and_read(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].to_dense(), tensor.detach().to_dense())


def test_tied_tensors_stay_tied_and_views_do_not_bring_their_whole_storage() -> None:
    weight = torch.randn(4, 4)
    bucket = torch.zeros(1_000_000)
    taken = snapshot({"a": weight, "b": weight, "view": bucket[10:20]}, copy=False)
    assert taken["a"].data_ptr() == taken["b"].data_ptr()
    assert taken["view"].untyped_storage().nbytes() == 40
    copied = snapshot({"a": weight, "b": weight}, copy=True)
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != weight.data_ptr()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (lambda: 1, "function"),
        (object(), r"builtins\.object"),
        (b"", r"frombuffer"),
        (torch.empty(2, device="meta"), "meta device"),
        (nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_could_not_be_read_back_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        snapshot({"outer": {"inner": value}}, copy=True)


def test_an_array_of_numpy_is_refused_with_the_way_out() -> None:
    numpy: Any = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match=r"torch\.from_numpy"):
        snapshot({"a": numpy.zeros(3)}, copy=True)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("layer.weight", "layer.weight"),
        ("module.layer.weight", "layer.weight"),
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("_orig_mod.module.layer.weight", "layer.weight"),
        ("module.module.layer._orig_mod.weight", "layer.weight"),
        ("layer.module.weight", "layer.module.weight"),
        ("module", "module"),
    ],
)
def test_names_lose_what_wrappers_put_before_them(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_a_model_with_a_part_of_its_own_called_module_keeps_its_names() -> None:
    own = {"module.weight": 1, "head.weight": 2}
    assert with_plain_names(own) == own
    clash = {"module.weight": 1, "module.module.weight": 2}
    assert with_plain_names(clash) == clash
    assert with_names_of({"module.weight": 1}, ["module.weight"]) == {"module.weight": 1}


def test_names_are_found_again_in_a_wrapped_model_and_unknown_ones_stay_for_torch_to_name() -> None:
    wanted = ["module._orig_mod.a", "module._orig_mod.b"]
    assert with_names_of({"a": 1, "c": 3}, wanted) == {"module._orig_mod.a": 1, "c": 3}


def test_the_versions_of_a_state_dict_go_along() -> None:
    state = nn.DataParallel(nn.BatchNorm1d(2)).state_dict()
    versions = getattr(with_plain_names(state), "_metadata")  # noqa: B009  -- no attribute that mypy knows
    assert versions[""]["version"] == 2


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@settings(deadline=None)
@given(SIZES)
def test_shards_of_any_rows_are_joined_to_the_whole(rows: list[int]) -> None:
    whole = torch.arange(sum(rows) * 3).reshape(sum(rows), 3)
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    trees = [
        {"layer": {"w": shard(whole[start : start + count], start, whole.shape)}, "rank": rank}
        for rank, (start, count) in enumerate(zip(starts, rows, strict=True))
    ]
    joined = assemble(list(reversed(trees)))
    assert torch.equal(joined["layer"]["w"], whole)


def test_shards_that_do_not_cover_the_whole_are_refused() -> None:
    whole = torch.arange(12).reshape(6, 2)
    parts = [{"w": shard(whole[a:b], a, whole.shape)} for a, b in ((0, 2), (2, 4), (4, 6), (1, 3))]
    with pytest.raises(CheckpointError, match=r"sharded\['w'\] do not add up to \(6, 2\): row 2"):
        assemble([parts[0], parts[2]])
    with pytest.raises(CheckpointError, match="row 2"):
        assemble([*parts[:1], parts[3], parts[2]])
    with pytest.raises(CheckpointError, match="row 4"):
        assemble(parts[:2])
    with pytest.raises(ValueError, match="not part of"):
        shard(whole, 1, whole.shape)


def names(*steps: int) -> list[Published]:
    return [Published(number, step) for number, step in enumerate(steps, 1)]


@pytest.mark.parametrize(
    ("retention", "whole", "damaged", "gone"),
    [
        (Retention(2), names(10, 20, 30), [], [10]),
        (Retention(None), names(10, 20, 30), [], []),
        (Retention(1, 20), names(10, 20, 30, 40, 50), [], [10, 30]),
        (Retention(3), names(10, 20), [], []),
        (Retention(2), names(10, 20, 30, 15), [], [10, 20]),  # published last stays, whatever its step
        (Retention(2), [Published(1, 10), Published(4, 40)], [Published(2, 20), Published(3, 30)], []),
        (Retention(1), [Published(1, 10), Published(4, 40)], [Published(3, 30)], [10, 30]),
        (Retention(1), [Published(1, 10)], [Published(2, 20)], []),  # the last good one is never given up
        (Retention(1, 10), [Published(2, 20)], [Published(1, 10)], [10]),  # a damaged milestone is none
    ],
)
def test_only_superfluous_checkpoints_go(
    retention: Retention, whole: list[Published], damaged: list[Published], gone: list[int]
) -> None:
    assert [name.step for name in retention.superfluous(whole, damaged)] == gone


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": 0}])
def test_keeping_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Retention(**options)
