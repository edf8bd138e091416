"""Colours where a person wants them, that can be read on any background, and that end where they should."""

from __future__ import annotations

import pytest

from dlaunch.launcher.colour import PALETTE, closed, in_rank_colour, is_coloured


@pytest.mark.parametrize(
    ("is_terminal", "environ", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "0"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_who_decides_on_colours(is_terminal: bool, environ: dict[str, str], expected: bool) -> None:
    assert is_coloured(is_terminal, environ) is expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"plain\n", b"plain\n"),
        (b"\x1b[1mbold\x1b[0m\n\x1b[mx\n", b"\x1b[1mbold\x1b[0m\n\x1b[mx\n"),
        (b"\x1b[0m\x1b[1mbold\n\n", b"\x1b[0m\x1b[1mbold\x1b[0m\n\n"),
        (b"\x1b[0;32mgreen\n", b"\x1b[0;32mgreen\x1b[0m\n"),
        (b"\x1b\n", b"\x1b\x1b[0m\n"),
    ],
)
def test_what_a_line_leaves_coloured_is_reset_at_its_end(line: bytes, expected: bytes) -> None:
    assert closed(line) == expected


def test_every_colour_can_be_read_on_black_and_on_white() -> None:
    assert len(set(PALETTE)) == len(PALETTE)
    for colour in PALETTE:
        light = luminance(colour)
        assert (light + 0.05) / 0.05 >= 3, colour
        assert 1.05 / (light + 0.05) >= 3, colour


def luminance(colour: int) -> float:
    """WCAG 2 relative luminance of a colour of the 6x6x6 cube (16 to 231)."""
    steps = (0, 95, 135, 175, 215, 255)
    index = colour - 16
    channels = [steps[index // 36] / 255, steps[index // 6 % 6] / 255, steps[index % 6] / 255]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ranks_beyond_the_palette_start_again() -> None:
    assert in_rank_colour(b"0:0 ", len(PALETTE) + 2) == in_rank_colour(b"0:0 ", 2)
