"""What happened, told for people: who did what, and when."""

from __future__ import annotations

from typing import NamedTuple

from .clock import Scheduler


class Line(NamedTuple):
    """One thing that happened."""

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:<9} {self.what}"


class Story:
    """The lines of one run. One that is not kept costs next to nothing: ask `kept` before a sentence is made."""

    def __init__(self, scheduler: Scheduler, kept: bool) -> None:
        self.kept = kept
        self.lines: list[Line] = []
        self._scheduler = scheduler

    def tell(self, who: str, what: str) -> None:
        """Add a line, where the story is kept."""
        if self.kept:
            self.lines.append(Line(self._scheduler.now, who, what))

    def text(self) -> str:
        """The whole story."""
        return "\n".join(map(str, self.lines))
