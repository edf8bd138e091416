"""The last lines that a stream carried, kept for the report."""

from __future__ import annotations

import re

KEPT_BYTES = 16 * 1024
LONGEST_SHOWN = 500  # characters of a line

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Tail:
    """The last 16 KiB of a stream."""

    def __init__(self) -> None:
        self._bytes = b""
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        """Take note of what the stream carried."""
        kept = chunk if len(chunk) >= KEPT_BYTES else self._bytes + chunk
        self._cut = self._cut or len(kept) > KEPT_BYTES or (kept is chunk and bool(self._bytes))
        self._bytes = kept[-KEPT_BYTES:]

    def lines(self, most: int) -> tuple[str, ...]:
        """The last non-blank lines, as they would stand on a terminal: no control characters, at most 500 long."""
        lines = self._bytes.decode("utf-8", "replace").split("\n")
        if self._cut and len(lines) > 1:
            del lines[0]  # its beginning is gone
        shown = [text for line in lines if (text := _as_seen(line))]
        return tuple(shown[-most:]) if most > 0 else ()


def _as_seen(line: str) -> str:
    *updates, last = line.rstrip("\r").split("\r")
    text = last if last.strip() else next((update for update in reversed(updates) if update.strip()), "")
    text = _CONTROL.sub("", text).rstrip()
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
