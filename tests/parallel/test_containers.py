"""Containers are opened one level at a time, and rebuilt as what they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch

from dlaunch.parallel.dp.containers import opened

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    value: int
    doubled: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.value)


class Tagged(list[Any]):
    """A list that carries more than its items."""

    tag = ""


@pytest.mark.parametrize(
    ("value", "children", "names"),
    [
        ((1, 2), (1, 2), ("[0]", "[1]")),
        ([1], (1,), ("[0]",)),
        ({"a": 1, 2: 3}, (1, 3), ("['a']", "[2]")),
        (Pair(1, 2), (1, 2), (".left", ".right")),
        (OrderedDict(x=1), (1,), ("['x']",)),
        (torch.Size([4, 5]), (4, 5), ("[0]", "[1]")),
        (Frozen(3), (3, 6), (".value", ".doubled")),
        ((), (), ()),
    ],
)
def test_a_container_names_its_children_and_is_rebuilt_with_its_own_type(value: Any, children: Any, names: Any) -> None:
    container: Any = opened(value)
    assert (container.children, container.names) == (children, names)
    same = container.rebuild(container.children)
    assert same == value and type(same) is type(value)


@pytest.mark.parametrize("value", [1, "text", None, torch.ones(2), {1, 2}, Frozen, range(3)])
def test_what_is_no_container_stays_closed(value: Any) -> None:
    assert opened(value) is None


def test_a_rebuilt_dictionary_keeps_its_default_factory_and_leaves_the_original_alone() -> None:
    value: Any = defaultdict(list, a=1)
    container: Any = opened(value)
    like = container.rebuild([2])
    assert like["a"] == 2 and like["missing"] == [] and dict(value) == {"a": 1}


def test_a_rebuilt_list_keeps_what_its_class_adds() -> None:
    value = Tagged([1, 2])
    value.tag = "kept"
    container: Any = opened(value)
    like = container.rebuild([3, 4])
    assert like == [3, 4] and like.tag == "kept" and value == [1, 2]


def test_a_frozen_dataclass_is_rebuilt_without_being_initialised_again() -> None:
    container: Any = opened(Frozen(3))
    like = container.rebuild([5, 7])
    assert (like.value, like.doubled) == (5, 7)
    with pytest.raises(FrozenInstanceError):
        like.value = 1
