"""Which checkpoints stay: a decision over names, with no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .manifest import Published


@dataclass(frozen=True, slots=True)
class Retention:
    """How many checkpoints are kept.

    Attributes:
        keep_last: so many of those published last; ``None`` keeps all.
        keep_every: besides, those of steps that are a multiple of it, for ever.
    """

    keep_last: int | None = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give 1 or more, or None")

    def superfluous(self, whole: Sequence[Published], damaged: Sequence[Published] = ()) -> list[Published]:
        """What may be deleted.

        Args:
            whole: the good checkpoints.
            damaged: those that could not be read; they count for nothing, and go once ``keep_last`` good ones were
                published after them.
        """
        if self.keep_last is None:
            return []
        last = sorted(whole)[-self.keep_last :]
        if len(last) < self.keep_last:
            return []
        old = [name for name in (*whole, *damaged) if name < last[0]]
        return sorted(name for name in old if name in damaged or not self._is_milestone(name.step))

    def _is_milestone(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0
