"""Fixtures for tests that look for every process that they started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .marked import kill_marked, new_mark


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for processes; those that a failed test leaves do not stay."""
    mark = new_mark()
    yield mark
    kill_marked(mark)
