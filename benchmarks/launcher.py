"""Measures dlaunch against torchrun on this machine, in one run: arms take turns, medians and paired ratios are shown.

    python benchmarks/launcher.py                       everything, five rounds
    python benchmarks/launcher.py --only recovery       one question (see --list)
    python benchmarks/launcher.py --quick               one round of smaller sizes: only to see whether it works

The figures go to bench-results/ as JSON too. See docs/how-to/run-the-benchmarks.md for what each one means.
"""

from __future__ import annotations

import argparse
import signal
import sys

import results
from ending import ending
from footprint import agent_memory, help_cpu
from process_tree import adopt_orphans
from question import Measure, Numbers, Question
from ratios import table
from recovery import recovery
from start_up import first_line
from torn_lines import torn_lines
from trial import TimedOut, Trial
from workers_memory import workers_memory


def main() -> int:
    arguments = _parse_arguments()
    chosen = questions(arguments.quick)
    if arguments.list:
        print(*(question.name for question in chosen), sep="\n")
        return 0
    if arguments.only:
        chosen = [question for question in chosen if question.name in arguments.only]
    rounds = 1 if arguments.quick else arguments.runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the blocks that clear up
    adopt_orphans()
    document = {**results.begin("dlaunch.bench/1"), "rounds": rounds, "questions": {}}
    left_behind: list[str] = []
    for question in chosen:
        if not arguments.quick:
            _warm_up(question)
        figures = _measure(question, rounds, left_behind)
        document["questions"][question.name] = figures
        for metric in question.metrics:
            print(*table(metric, figures[metric.name]), "", sep="\n", flush=True)
    path = results.end(document, "launcher")
    _say_what_was_left(left_behind)
    print(f"written to {path}")
    return 1 if any(line.startswith("dlaunch") for line in left_behind) else 0


def questions(quick: bool) -> list[Question]:
    """All that can be measured; ``quick`` takes smaller sizes, for a look at whether it works."""
    return [
        first_line(),
        help_cpu(),
        agent_memory(),
        recovery(),
        ending(),
        *[workers_memory(nproc) for nproc in (4, 8)],
        torn_lines(500 if quick else 20_000),
    ]


def _parse_arguments() -> argparse.Namespace:
    names = [question.name for question in questions(quick=False)]
    parser = argparse.ArgumentParser(description="Measure dlaunch against torchrun, arm by arm in turns.")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--runs", type=int, default=5, help="rounds; five at least for a figure to be told")
    parser.add_argument("--quick", action="store_true", help="one round of smaller sizes, to see whether it works")
    parser.add_argument("--list", action="store_true", help="print what can be measured")
    return parser.parse_args()


def _warm_up(question: Question) -> None:
    """One trial of each arm that does not count: it fills the disk's cache and writes what Python compiles."""
    for arm, measure in question.arms.items():
        _try(question, arm, measure, [])


def _measure(question: Question, rounds: int, left_behind: list[str]) -> dict[str, dict[str, list[float | None]]]:
    """A, B, C, A, B, C, ...: what disturbs the machine disturbs all arms."""
    figures: dict[str, dict[str, list[float | None]]] = {
        metric.name: {arm: [] for arm in question.arms} for metric in question.metrics
    }
    for number in range(rounds):
        for arm, measure in question.arms.items():
            _show_progress(f"{question.name}: round {number + 1} of {rounds}, {arm}")
            numbers = _try(question, arm, measure, left_behind)
            for metric in question.metrics:
                figures[metric.name][arm].append(numbers.get(metric.name))
    _show_progress("")
    return figures


def _try(question: Question, arm: str, measure: Measure, left_behind: list[str]) -> Numbers:
    """The numbers of one trial; none if it hung or failed."""
    numbers: Numbers = {}
    with Trial(question.environments[arm]) as trial:
        try:
            numbers = measure(trial)
        except TimedOut:
            _show_progress("")
            print(f"  {question.name}, {arm}: a trial hung or failed", flush=True)
    left_behind.extend(f"{arm}, {question.name}: {process}" for process in trial.left)
    return numbers


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _say_what_was_left(left_behind: list[str]) -> None:
    if left_behind:
        print("processes that outlived their launcher:", *left_behind, sep="\n  ")
    else:
        print("no process outlived its launcher")


if __name__ == "__main__":
    sys.exit(main())
