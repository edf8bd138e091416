"""Medians, ratios and the table that shows them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Samples = Mapping[str, Sequence[float | None]]  # by arm, in the order of the rounds; None: the trial hung or failed


@dataclass(frozen=True, slots=True)
class Budget:
    """What one arm of a metric must reach; `holds` gets the medians of all arms."""

    arm: str
    text: str
    holds: Callable[[Mapping[str, float]], bool]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a trial: what it is, and what it should be."""

    name: str
    title: str
    unit: str  # "s", "MB" or "" for a count
    budgets: tuple[Budget, ...] = ()
    reference: str = "torchrun"  # the arm that the others are compared with


def medians(samples: Samples) -> dict[str, float]:
    """The median of each arm that came through at least once."""
    finished = {arm: [value for value in values if value is not None] for arm, values in samples.items()}
    return {arm: median(values) for arm, values in finished.items() if values}


def paired_ratio(reference: Sequence[float | None], values: Sequence[float | None]) -> float | None:
    """The median over the rounds of reference / value, for rounds in which both came through."""
    pairs = [(a, b) for a, b in zip(reference, values, strict=True) if a is not None and b]
    return median(a / b for a, b in pairs) if pairs else None


def table(metric: Metric, samples: Samples) -> Iterator[str]:
    """The lines of one metric: an arm each."""
    yield f"{metric.title}{f' ({metric.unit})' if metric.unit else ''}"
    middle = medians(samples)
    for arm, values in samples.items():
        budgets = [budget for budget in metric.budgets if budget.arm == arm]
        verdicts = "; ".join(f"{_verdict(budget, middle)}: {budget.text}" for budget in budgets)
        ratio = paired_ratio(samples.get(metric.reference, [None] * len(values)), values)
        compared = f"{ratio:7.1f} x" if ratio is not None and arm != metric.reference else " " * 9
        yield f"  {arm:<22} {_spread(values)}  {compared}  {verdicts}".rstrip()


def _verdict(budget: Budget, middle: Mapping[str, float]) -> str:
    try:
        return "met" if budget.holds(middle) else "MISSED"
    except KeyError:  # an arm that it needs never came through
        return "not known"


def _spread(values: Sequence[float | None]) -> str:
    finished = [value for value in values if value is not None]
    failed = f", {len(values) - len(finished)} of {len(values)} hung or failed" if len(finished) < len(values) else ""
    if not finished:
        return f"{'-':>9}{failed}"
    return f"{_number(median(finished)):>9} ({_number(min(finished))} - {_number(max(finished))}{failed})"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 and value != int(value) else f"{value:.0f}"
