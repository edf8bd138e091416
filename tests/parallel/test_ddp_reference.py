"""The class keeps torch's signature, and its page names all that it takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dlaunch.parallel import DistributedDataParallel

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "parallel-ddp.md"


def arguments_of(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name != "self"]


def test_torchs_arguments_come_first_and_in_the_same_order() -> None:
    torchs = arguments_of(TorchDDP)
    ours = arguments_of(DistributedDataParallel)
    assert [name for name in torchs if name in ours] == torchs
    assert ours[: len(torchs)] == torchs


@pytest.mark.parametrize("name", arguments_of(DistributedDataParallel))
def test_an_argument_is_missing_from_the_reference_page(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text()
