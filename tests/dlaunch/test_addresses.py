"""A host and its port are one text, and can be told apart again."""

from __future__ import annotations

import pytest

from dlaunch.addresses import host_and_port, join_host_and_port


@pytest.mark.parametrize(
    ("address", "parts"),
    [("e1:2379", ("e1", 2379)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[fd00::1]:65535", ("fd00::1", 65535))],
)
def test_an_address_is_put_together_or_split_elsewhere(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts
    assert join_host_and_port(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "e1", "e1:", ":1", "[]:1", "e1:0", "e1:65536", "e1:+1", "e1:1_0", "::1:1", "e1:x"]
)
def test_a_text_that_is_no_address_is_split(address: str) -> None:
    with pytest.raises(ValueError):
        host_and_port(address)
