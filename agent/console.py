"""What the agent needs from whoever shows its output: a protocol that the launcher implements."""

from __future__ import annotations

from typing import Literal, Protocol

from dlaunch.environ import Place

Stream = Literal["stdout", "stderr"]


class Console(Protocol):
    """The terminal (or pipe) that a person reads. No method ever blocks on a slow reader."""

    def prefix(self, place: Place, stream: Stream, *, tee: bool) -> bytes:
        """What stands before each line of a worker; may be empty.

        The output of a job's only worker is passed through as it comes where the prefix is empty; of several workers
        it is shown in whole lines all the same.

        ``tee`` is true for a stream that was named by ``--tee`` and so gets torchrun's prefix.
        """

    def write(self, stream: Stream, data: bytes) -> None:
        """Queue bytes that are whole lines (or, where the prefix is empty, anything)."""

    def notice(self, text: str) -> None:
        """Queue one line of dlaunch's own, to stderr."""
