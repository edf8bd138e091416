"""Whether a stream is coloured, and which colour is whose: plain SGR codes, so that nothing needs to be imported."""

from __future__ import annotations

import re
from collections.abc import Mapping

RESET = b"\x1b[0m"
BOLD = b"\x1b[1m"

# Colours of the 256-colour cube that stand out from black and from white alike (contrast at least 3:1 with both), and
# from their neighbours in this list; red is left out, as it says "error".
PALETTE = (31, 133, 64, 130, 69, 168, 29, 136, 98, 170, 28, 131)

_LEFT_OPEN = re.compile(rb"\x1b(?!\[0?m)[^\x1b\n]*(?=\n)")


def is_coloured(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """NO_COLOR first, then FORCE_COLOR and CLICOLOR_FORCE, then TERM=dumb, then whether it is a terminal.

    Source: no-color.org, force-color.org, bixense.com/clicolors; the order is CPython's.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "") not in ("", "0") or environ.get("CLICOLOR_FORCE", "") not in ("", "0"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def in_rank_colour(text: bytes, rank: int) -> bytes:
    """``text`` in the colour of a rank."""
    return b"\x1b[38;5;%dm%b%b" % (PALETTE[rank % len(PALETTE)], text, RESET)


def in_bold(text: bytes) -> bytes:
    """``text`` in bold."""
    return BOLD + text + RESET


def closed(lines: bytes) -> bytes:
    """``lines`` with a reset at the end of each line that a worker's own escape sequence would leave coloured."""
    return _LEFT_OPEN.sub(rb"\g<0>" + RESET, lines)
