"""Many seeds, one after the other: a line for each that breaks a rule, and the story of one on request."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from .brain import make_brain
from .cluster import Cluster, MakeBrain, Result
from .plan import Plan, draw_crowd, draw_plan

SMALL = 5  # agents: up to so many, faults are what is looked for


def simulate(plan: Plan, brain: MakeBrain = make_brain, *, tells: bool = False) -> Result:
    """Run a plan to its end."""
    return Cluster(plan, brain, tells=tells).run()


def shrink(plan: Plan, rule: str, brain: MakeBrain = make_brain) -> Plan:
    """The same run with fewer faults, as long as it breaks the same rule."""
    faults, index = list(plan.faults), 0
    while index < len(faults):
        fewer = plan._replace(faults=tuple(faults[:index] + faults[index + 1 :]))
        found = simulate(fewer, brain).violation
        if found is not None and found.rule == rule:
            del faults[index]
        else:
            index += 1
    return plan._replace(faults=tuple(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 1 where a rule was broken."""
    asked = _parser().parse_args(arguments)
    began, broken, steps = time.monotonic(), Counter[str](), 0
    for report in _reports(asked):
        steps += report.steps
        if report.text:
            print(report.text, flush=True)
        if report.rule:
            broken[report.rule] += 1
    took_s = max(1e-9, time.monotonic() - began)
    what = ", ".join(f"{count} broke {rule!r}" for rule, count in broken.items()) or "no rule was broken"
    print(f"{asked.count} seeds, {steps} steps in {took_s:.1f} s ({asked.count / took_s:.0f} seeds/s): {what}")
    return 1 if broken else 0


class Report(NamedTuple):
    """What is to be said of one seed."""

    rule: str  # that was broken; empty: none
    text: str
    steps: int


def _reports(asked: argparse.Namespace) -> Iterator[Report]:
    seeds, examine = range(asked.seed, asked.seed + asked.count), partial(_examine, asked)
    if asked.jobs == 1:
        yield from map(examine, seeds)
        return
    with ProcessPoolExecutor(asked.jobs) as pool:
        yield from pool.map(examine, seeds, chunksize=50)


def _examine(asked: argparse.Namespace, seed: int) -> Report:
    """Run one seed, and say what is to be said of it."""
    plan = draw_crowd(seed, asked.agents) if asked.calm else draw_plan(seed, asked.agents)
    result = simulate(plan, tells=asked.story)
    lines = [_introduce(plan), result.story.text()] if asked.story else []
    if asked.calm:
        lines.append(_times(asked.agents, result))
    if result.violation is None:
        return Report("", "\n".join(lines), result.steps)
    rule = result.violation.rule
    lines.append(f"seed {seed}: {result.violation}")
    if asked.shrink:
        short = shrink(plan, rule)
        lines += [_introduce(short), simulate(short, tells=True).story.text()]
    return Report(rule, "\n".join(lines), result.steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dlaunch.simulation", description="Run whole clusters in one process, on a virtual clock."
    )
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds (default: 1)")
    parser.add_argument(
        "--agents",
        type=int,
        default=SMALL,
        help=f"at most so many at the start (default: {SMALL}; with --calm: exactly)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="so many processes (default: 1)")
    parser.add_argument("--calm", action="store_true", help="no faults: how long does it take until all train?")
    parser.add_argument("--story", action="store_true", help="tell all that happens")
    parser.add_argument("--shrink", action="store_true", help="tell a failing seed with as few faults as will do")
    return parser


def _introduce(plan: Plan) -> str:
    settings = plan.settings
    hosts = ", ".join(f"{host.workers} workers from {host.starts_at:.1f} s" for host in plan.hosts[:10])
    return (
        f"seed {plan.seed}: {len(plan.hosts)} hosts ({hosts}); {settings.min_nodes} to {settings.max_nodes} nodes, "
        f"lease {settings.lease_ttl_s:g} s, outage limit {settings.outage_limit_s:g} s, "
        f"{settings.max_restarts} restarts, {plan.needed_s:.1f} s of training"
        f"{'' if plan.store_on is None else ', a private etcd on the first host'}; {plan.weather}"
    )


def _times(agents: int, result: Result) -> str:
    whole = f"{result.worlds[0].at:.2f} s" if result.worlds else "never"
    each = ", ".join(f"{count / agents:.1f} {what}" for what, count in result.counts.items())
    return (
        f"{agents} agents: all train after {whole} (virtual); for an agent {each}; the end at {result.ended_at:.2f} s"
    )
