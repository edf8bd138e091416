"""Text from elsewhere on a terminal line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlaunch.launcher.text import cut, printable, width


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("caf\u00e9 \u4e2d\u6587 \U0001f600", "caf\u00e9 \u4e2d\u6587 \U0001f600"),
        ("a\tb\nc\rd", "a b c d"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ended", ""),
        ("\x1bcreset", "reset"),
        ("bell\x07, \x00, \x7f, \x9b31m", "bell, , , 31m"),
        ("left\u202eright", "leftright"),
        ("not UTF-8: \udcff", "not UTF-8: \ufffd"),
    ],
)
def test_a_terminal_would_act_on_a_text(text: str, expected: str) -> None:
    assert printable(text) == expected


@pytest.mark.parametrize(("text", "cells"), [("", 0), ("abc", 3), ("\u4e2d\u6587", 4), ("e\u0301", 1), ("\u00e9", 1)])
def test_the_width_of_a_text_is_wrong(text: str, cells: int) -> None:
    assert width(text) == cells


@pytest.mark.parametrize(
    ("text", "cells", "expected"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 5, "abcd\u2026"),
        ("\u4e2d\u6587\u4e2d", 5, "\u4e2d\u6587\u2026"),
        ("abc", 1, "\u2026"),
    ],
)
def test_a_text_is_cut_elsewhere(text: str, cells: int, expected: str) -> None:
    assert cut(text, cells) == expected


@given(text=st.text(), cells=st.integers(1, 40))
def test_a_cut_text_is_too_wide_or_not_printable(text: str, cells: int) -> None:
    line = cut(printable(text), cells)
    assert width(line) <= cells
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in line)
