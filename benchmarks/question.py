"""Something to measure: the arms, each of which is one trial that returns its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratios import Metric
from trial import Launcher, Trial

Numbers = dict[str, float]  # by the name of the metric
Measure = Callable[[Trial], Numbers]


@dataclass(frozen=True, slots=True)
class Question:
    """Something to measure, in the same way for every arm."""

    name: str
    metrics: tuple[Metric, ...]
    arms: dict[str, Callable[[Trial], Numbers]]
    environments: dict[str, dict[str, str]]


def ask(name: str, metrics: tuple[Metric, ...], arms: dict[Launcher, Callable[[Trial], Numbers]]) -> Question:
    by_name = {launcher.name: arm for launcher, arm in arms.items()}
    return Question(name, metrics, by_name, {launcher.name: launcher.environment for launcher in arms})
