"""Reads what programs/ddp_steps.py has noted."""

from __future__ import annotations

from trial import Trial


def events(trial: Trial, rank: int) -> list[list[str]]:
    try:
        lines = (trial.folder / f"events_{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [fields for line in lines if len(fields := line.split()) == 4]


def times(trial: Trial, event: str, rank: int, after: float) -> list[float]:
    return [float(at) for name, _attempt, _pid, at in events(trial, rank) if name == event and float(at) > after]


def restarted(trial: Trial, event: str, rank: int) -> list[float]:
    """The times of an event in the newest attempt after the first; empty while there is none."""
    lines = events(trial, rank)
    newest = lines[-1][1] if lines else "0"
    return [float(at) for name, attempt, _pid, at in lines if name == event and attempt == newest != "0"]
