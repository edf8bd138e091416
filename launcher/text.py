"""Text from elsewhere, made fit for a terminal line."""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata

# What a terminal acts on: control sequences (colours, movement), strings such as titles and links, other escapes.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL)


def printable(text: str) -> str:
    """``text`` on one line, without anything that a terminal would act on; tabs become spaces."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, _ESCAPES.sub("", text)))


def _shown(character: str) -> str:
    if character in "\t\n\r\v\f\u2028\u2029\x85":
        return " "
    category = unicodedata.category(character)
    if category == "Cs":  # a byte that was not UTF-8
        return "\ufffd"
    return "" if category in ("Cc", "Cf") else character  # Cf turns the direction of text around


def width(text: str) -> int:
    """The terminal cells that a printable text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, cells: int) -> str:
    """``text`` cut to ``cells`` terminal cells, with an ellipsis where something is missing."""
    if width(text) <= cells:
        return text
    taken, used = [], 1  # the ellipsis
    for character in text:
        used += _cells(character)
        if used > cells:
            break
        taken.append(character)
    return "".join(taken) + "\u2026"


def say(text: str, *, one_line: bool = True) -> None:
    """Print to stderr, if there is one; a reader that went away is no reason to fail."""
    if sys.stderr is None:  # closed before we started; print would take stdout
        return
    with contextlib.suppress(OSError, ValueError):
        print(printable(text) if one_line else text, file=sys.stderr, flush=True)
