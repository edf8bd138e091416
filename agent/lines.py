"""Cuts a worker's bytes into what a console may show: whole lines, and now and then a progress bar's latest state."""

from __future__ import annotations

import re

LONGEST_LINE = 64 * 1024 * 1024  # bytes; what is longer is shown in pieces of exactly this size
UPDATE_EVERY_S = 1.0  # of a progress bar, for each stream

_CURSOR_UP = re.compile(rb"(?:\x1b\[\d*A)+$")


def with_prefix(lines: bytes, prefix: bytes) -> bytes:
    """``prefix`` before each line of ``lines``, which is empty or ends with a newline."""
    if not lines or not prefix:
        return lines
    return b"%b%b\n" % (prefix, lines[:-1].replace(b"\n", b"\n" + prefix))


class WholeLines:
    """Gives back the whole lines of a stream that comes in chunks, and holds the rest.

    A line of more than ``longest`` bytes comes out in pieces of exactly that size, each with a newline of its own,
    wherever the chunks were cut.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        self._held_size = 0

    def feed(self, chunk: bytes) -> bytes:
        """The lines that ``chunk`` completes, each with its newline; empty when there is none."""
        if self._held_size + len(chunk) > self._longest:
            return self._feed_in_pieces(chunk)
        end = chunk.rfind(b"\n") + 1
        if not end:
            self.hold(chunk)
            return b""
        lines = self.take() + chunk[:end]
        self.hold(chunk[end:])
        return lines

    def _feed_in_pieces(self, chunk: bytes) -> bytes:
        shown = []
        while self._held_size + len(chunk) > self._longest:
            room = self._longest - self._held_size
            shown.append(self.feed(chunk[:room]))
            if self._held_size == self._longest:
                shown.append(self.take() + b"\n")
            chunk = chunk[room:]
        shown.append(self.feed(chunk))
        return b"".join(shown)

    def hold(self, piece: bytes) -> None:
        """Keep ``piece``, which has no newline, behind what is held."""
        if piece:
            self._held.append(piece)
            self._held_size += len(piece)

    def take(self) -> bytes:
        """The text after the last newline, which is held no longer."""
        held = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._held_size = 0
        return held


class ConsoleLines:
    """A stream's whole lines, ready for the console, with the progress bars among them thinned out.

    [Note: carriage returns] A piece of a line that ends with a carriage return (other than those right before the
    newline) is an update: a terminal would overwrite it. So is the last piece of such a line when it ends by moving
    the cursor up, which is how nested bars find their way back. Updates are shown at most once in ``update_every_s``,
    each as a line of its own; the last one before a newline or the end of the stream is always shown. A blank update
    erases a bar: it is never shown, and a line that ends with one shows the update before it. Text that no carriage
    return follows is ordinary and always shown.
    """

    def __init__(self, longest: int = LONGEST_LINE, update_every_s: float = UPDATE_EVERY_S) -> None:
        self._lines = WholeLines(longest)
        self._every_s = update_every_s
        self._after_return = False  # a carriage return stood before what is held: it is an update, or ends the line
        self._held_return = False  # what is held ends with a carriage return: an update, or the first half of \r\n
        self._waiting = b""  # the last complete update, if it was not shown
        self._shown = b""  # the last update of the current line that was shown
        self._next_at = 0.0  # when an update may be shown again
        self._fresh = False  # something came since ``update`` last looked

    @property
    def due_at(self) -> float | None:
        """When ``update`` should be asked; None when it would have nothing to show."""
        return self._next_at if self._fresh else None

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The lines to show for ``chunk``; ``now`` in seconds above 0, on any clock that never goes back."""
        if not (self._after_return or self._held_return or b"\r" in chunk):
            return self._lines.feed(chunk)
        lines = self._lines.feed(chunk)
        shown = [self._settle(line) for line in lines[:-1].split(b"\n")] if lines else []
        self._drop_updates_held()
        self._fresh = True
        if self._waiting and now >= self._next_at:
            shown.append(self._show(self._waiting, now))
        return b"".join(shown)

    def update(self, now: float) -> bytes:
        """The latest state of a progress bar as a line, when one waits and it is time."""
        if not self._fresh or now < self._next_at:
            return b""
        self._fresh = False
        text = self._current() or self._waiting
        return self._show(text, now) if text and text != self._shown else b""

    def finish(self) -> bytes:
        """What is left when the stream has ended, as lines."""
        rest = self._lines.take()
        line = self._settle(rest, at_end=True) if rest or self._after_return else b""
        waiting, self._waiting, self._fresh = self._waiting, b"", False
        return line + waiting + b"\n" if waiting else line

    def _settle(self, line: bytes, *, at_end: bool = False) -> bytes:
        """What to show for a line that is complete (given without its newline)."""
        *updates, text = line.rstrip(b"\r").split(b"\r")
        is_bar = self._after_return or bool(updates)
        self._after_return = self._held_return = False
        if not is_bar:
            text = line
        else:
            self._remember(updates)
            if upward := _CURSOR_UP.search(text):
                self._remember([text[: upward.start()]])
                return b""
            text = text if text.strip() else self._waiting or self._shown or text
            self._waiting = b""
        shown, self._shown = self._shown, b""
        if (shown and text.rstrip(b"\r") == shown) or (is_bar and at_end and not text.strip()):
            return b""
        return text + b"\n"

    def _drop_updates_held(self) -> None:
        """Of the unfinished line, go on holding the last piece only: a bar may run for days without a newline."""
        rest = self._lines.take()
        body = rest.rstrip(b"\r")
        *updates, last = body.split(b"\r")
        self._remember(updates)
        self._after_return = self._after_return or bool(updates)
        self._held_return = len(body) < len(rest)
        self._lines.hold(last + rest[len(body) :])

    def _remember(self, updates: list[bytes]) -> None:
        latest = next((update for update in reversed(updates) if update.strip()), None)
        if latest is not None:
            self._waiting = latest if latest != self._shown else b""

    def _current(self) -> bytes:
        """The update that is being held, complete or not; empty when what is held is no update, or blank."""
        if not (self._after_return or self._held_return):
            return b""
        held = self._lines.take()
        self._lines.hold(held)
        text = _CURSOR_UP.sub(b"", held.rstrip(b"\r"))
        return text if text.strip() else b""

    def _show(self, text: bytes, now: float) -> bytes:
        self._waiting, self._shown, self._next_at = b"", text, now + self._every_s
        return text + b"\n"
