"""Where the time of a training step goes: computing, communication beside it, and communication waited for."""

from __future__ import annotations

import time


class StepTimes:
    """Sums of nanoseconds over all reduced backwards.

    Attributes:
        steps: backwards that were reduced.
        forward_ns: in the module's forward.
        backward_ns: from the first gradient to the end of the backward, without waiting.
        communication_ns: from the first reduction's start to the last one's end.
        exposed_ns: waited for reductions at the end of backwards.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.forward_ns = 0
        self.backward_ns = 0
        self.communication_ns = 0
        self.exposed_ns = 0
        self._forward_began = self._began = self._communication_began = self._ended = 0

    def forward_began(self) -> None:
        """The module is about to run."""
        self._forward_began = time.perf_counter_ns()

    def forward_ended(self) -> None:
        """The module has run."""
        self.forward_ns += time.perf_counter_ns() - self._forward_began

    def backward_began(self) -> None:
        """The first gradient is ready."""
        self._began = time.perf_counter_ns()
        self._communication_began = 0

    def communication_began(self) -> None:
        """A bucket's reduction starts; only the first of a backward counts."""
        if not self._communication_began:
            self._communication_began = time.perf_counter_ns()

    def backward_ended(self) -> None:
        """All gradients are computed."""
        self._ended = time.perf_counter_ns()
        self.backward_ns += self._ended - self._began

    def communication_ended(self) -> None:
        """All gradients are averaged."""
        now = time.perf_counter_ns()
        self.exposed_ns += now - self._ended
        self.communication_ns += now - self._communication_began
        self.steps += 1

    def averages(self) -> dict[str, int]:
        """Nanoseconds for one step, under the names of torch's logging data."""
        steps = max(1, self.steps)
        overlap = self.communication_ns - self.exposed_ns
        return {
            "avg_forward_compute_time": self.forward_ns // steps,
            "avg_backward_compute_time": self.backward_ns // steps,
            "avg_backward_comm_time": self.communication_ns // steps,
            "avg_backward_compute_comm_overlap_time": overlap // steps,
            "avg_backward_exposed_comm_time": self.exposed_ns // steps,
        }
