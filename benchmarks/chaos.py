"""Kills and stops processes of real runs, at random but by seed, and checks that each run ends as it should.

python benchmarks/chaos.py --seed 1 --count 200     scenarios 1 to 200
python benchmarks/chaos.py --seed 37 --count 1      scenario 37 alone, as a failure tells to do
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chaos_run import Observation, carry_out
from expectation import expected
from process_tree import adopt_orphans, now
from scenario import Scenario, Start, draw
from verdict import complaints

OUTPUT_LINES = 40  # of a failed run that are shown


def main() -> int:
    arguments = _parse_arguments()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some victims would leave a core file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the blocks that clear up
    for signum in (
        signal.SIGINT,
        signal.SIGQUIT,
    ):  # ignored by what a shell runs in the background; dlaunch honours that
        signal.signal(signum, signal.SIG_DFL)
    adopt_orphans()
    begun_at = now()
    scenarios = list(_chosen(arguments))
    if arguments.list:
        print(*(f"seed {scenario.seed}: {scenario}" for scenario in scenarios), sep="\n")
        return 0
    failed = [scenario for scenario in scenarios if not _passes(scenario, arguments.keep)]
    _print_summary(scenarios, failed, now() - begun_at)
    return 1 if failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill and stop processes of real runs, and check how the runs end.")
    parser.add_argument("--seed", type=int, default=1, help="of the first scenario; the others follow one by one")
    parser.add_argument("--count", type=int, default=200, help="how many scenarios")
    parser.add_argument("--without-torch", action="store_true", help="leave out the scenarios that need torch")
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run none")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a failed scenario")
    return parser.parse_args()


def _chosen(arguments: argparse.Namespace) -> Iterator[Scenario]:
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        scenario = draw(seed)
        if not (arguments.without_torch and scenario.start is Start.WARM):
            yield scenario


def _passes(scenario: Scenario, keep: bool) -> bool:
    begun_at = now()
    with _folder(scenario.seed, keep) as folder:
        seen = carry_out(scenario, folder)
    wrong = complaints(seen, expected(scenario))
    verdict = "FAILED" if wrong else "ok"
    print(f"seed {scenario.seed:<5} {verdict:<6} {now() - begun_at:5.1f} s  {scenario}", flush=True)
    if wrong:
        _print_story(scenario, seen, wrong)
    return not wrong


@contextlib.contextmanager
def _folder(seed: int, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"dlaunch-chaos-{seed}-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _print_story(scenario: Scenario, seen: Observation, wrong: list[str]) -> None:
    print("    wrong:", *wrong, sep="\n      ")
    print("    what happened:", *seen.story, sep="\n      ")
    lines = seen.output.splitlines()
    print(
        f"    output, the last {min(len(lines), OUTPUT_LINES)} of {len(lines)} lines:",
        *lines[-OUTPUT_LINES:],
        sep="\n      ",
    )
    print(f"    again: make chaos SEED={scenario.seed} COUNT=1", flush=True)


def _print_summary(scenarios: list[Scenario], failed: list[Scenario], seconds: float) -> None:
    struck = Counter(scenario.victim.value for scenario in scenarios)
    when = Counter(scenario.moment.value for scenario in scenarios)
    print(f"{len(scenarios)} scenarios in {seconds:.0f} s, {len(failed)} failed")
    print("  struck:", ", ".join(f"{name} {count}" for name, count in struck.most_common()))
    print("  when:  ", ", ".join(f"{name} {count}" for name, count in when.most_common()))
    for scenario in failed:
        print(f"  failed: seed {scenario.seed}: {scenario}")


if __name__ == "__main__":
    sys.exit(main())
