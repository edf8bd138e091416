"""Features of DistributedDataParallel alone and in pairs, fifty steps each, against the naive class and one process.

    python benchmarks/parallel_ddp_matrix.py --world-sizes 2 3 --steps 50

The cases and the bounds are those of tests/parallel/ddp_matrix.py, of which the tests take a seeded sample. It takes
hours on two cores. Exit status 1, and a line for each, if any case fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.parallel.ddp_matrix import ALONE, PAIRS, Case, Outcome, check_all
from tests.parallel.worlds import RankFailed, World

TRANSPORTS = ("torch", "shared_memory")
CASE_TIMEOUT_S = 300


def check_world(size: int, cases: list[tuple[Case, str]], steps: int) -> Outcome:
    """All cases in one world; a case that breaks it costs a new world, not the rest of the run."""
    total = Outcome()
    world = World(size)
    began = time.monotonic()
    for number, case in enumerate(cases):
        total.cases += 1
        try:
            outcomes = world.run(check_all, size, [case], steps, timeout_s=CASE_TIMEOUT_S)
        except RankFailed as failure:
            total.failures.append(f"{size} ranks, {case}: {failure}")
            world = World(size)
            outcomes = []
        for outcome in outcomes:
            total.failures += outcome.failures
            total.worst = (max(total.worst[0], outcome.worst[0]), max(total.worst[1], outcome.worst[1]))
        if total.failures:
            print("\n".join(total.failures), flush=True)
            total.failures, total.failed = [], total.failed + 1
        if number % 100 == 99:
            print(f"  {number + 1} of {len(cases)} after {time.monotonic() - began:.0f} s", flush=True)
    world.close()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Check features of DistributedDataParallel alone and in pairs.")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3, 1, 5, 4])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--only", nargs="+", default=[], help="names of features; cases without any of them are left out"
    )
    parser.add_argument("--skip", type=int, default=0, help="leave out so many cases of the first world: go on there")
    arguments = parser.parse_args()
    chosen = [case for case in [*ALONE, *PAIRS] if not arguments.only or set(case) & set(arguments.only)]
    cases = [(case, transport) for case in chosen for transport in arguments.transports]
    failed = 0
    for number, size in enumerate(arguments.world_sizes):
        outcome = check_world(size, cases[arguments.skip if number == 0 else 0 :], arguments.steps)
        failed += outcome.failed
        naive, alone = outcome.worst
        told = f"{outcome.cases} cases of {arguments.steps} steps, {outcome.failed} failed"
        worst = f"worst difference as a part of the bound: {naive:.2f} to the naive class, {alone:.2f} to one process"
        print(f"{size} ranks: {told}; {worst}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
