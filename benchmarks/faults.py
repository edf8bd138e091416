"""Faults of two nodes that train: how long until the whole new world trains again, and whether two worlds ever ran.

    python benchmarks/faults.py                         every fault, three trials each
    python benchmarks/faults.py --only worker --only spare --trials 5
    python benchmarks/faults.py --torchrun              torchrun too, with a cap of 60 s; slow
    python benchmarks/faults.py --full                  also etcd away for a minute

Each node is a network namespace with an address and a name of its own, and so is each of the three etcd members. Needs
the right to make namespaces. The figures go to bench-results/ as JSON too. See docs/how-to/run-the-benchmarks.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from statistics import median
from typing import Any, NamedTuple

import results
from nodes_cases import CASES, Case
from nodes_scene import Arm, NoHosts, NotInTime, Scene, Stage, now
from process_tree import adopt_orphans

CAP_S = 60.0
OURS = Arm("dlaunch", True, 45.0)
TORCHRUN = Arm("torchrun", False, CAP_S)
UNSHARED = Arm("torchrun, own store", False, CAP_S, (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),))


class Trial(NamedTuple):
    """What one fault came to."""

    seconds: float | None  # None: not in time
    wrong: tuple[str, ...]
    notes: tuple[str, ...]
    story: str


def main() -> int:
    arguments = _parse_arguments()
    if arguments.list:
        print(*(f"{case.name:<14} {case.title}" for case in CASES), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the blocks that clear up
    adopt_orphans()
    cases = [case for case in CASES if _is_chosen(case, arguments)]
    arms = (OURS, TORCHRUN, UNSHARED) if arguments.torchrun else (OURS,)
    document: dict[str, Any] = {**results.begin("dlaunch.faults/1"), "trials": arguments.trials, "cases": {}}
    failed = False
    print(_HEAD, flush=True)
    with Stage.build(arguments.members) as stage:
        document["etcd"] = {"version": stage.etcd_version(), "members": arguments.members}
        for case in cases:
            for arm in arms if case.with_torchrun else (OURS,):
                trials = [_try(stage, case, arm) for _ in range(arguments.trials if arm is OURS else 1)]
                print(_row(case, arm, trials), flush=True)
                for trial in trials:
                    _tell_what_is_wrong(trial, arguments.stories)
                failed = failed or (arm is OURS and any(trial.wrong for trial in trials))
                document["cases"].setdefault(case.name, {})[arm.name] = _as_json(case, trials)
    path = results.end(document, "faults")
    before, after = (" ".join(f"{load:.1f}" for load in document[which]) for which in ("load_before", "load_after"))
    print(f"load average before: {before}, after: {after}, {document['cpus']} cores")
    print(f"etcd {document['etcd']['version']}, {arguments.members} members, without fsync; {_ON_SILENCE}")
    print(f"written to {path}")
    return 1 if failed else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how several nodes recover from faults.")
    names = [case.name for case in CASES]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--trials", type=int, default=3, help="of each fault")
    parser.add_argument("--members", type=int, choices=(1, 3), default=3, help="of the etcd")
    parser.add_argument("--torchrun", action="store_true", help="torchrun too, once each, where it has an answer")
    parser.add_argument("--full", action="store_true", help="also what takes minutes")
    parser.add_argument("--stories", action="store_true", help="tell what happened even where nothing is wrong")
    parser.add_argument("--list", action="store_true", help="print the faults")
    return parser.parse_args()


def _is_chosen(case: Case, arguments: argparse.Namespace) -> bool:
    if arguments.only:
        return case.name in arguments.only
    return arguments.full or not case.full_only


def _try(stage: Stage, case: Case, arm: Arm) -> Trial:
    scene = Scene(stage, arm, case.nnodes)
    seconds: float | None = None
    try:
        seconds = case.act(scene)
        if arm.is_ours:
            scene.finish()
    except NotInTime as problem:
        scene.wrong.append(str(problem).partition("\n")[0])
        if orphans := [life for life in scene.world_now() if life.steps and now() - life.steps[-1][0] < 1.0]:
            scene.notes.append(f"{len(orphans)} old workers train on, whoever looks after them")
    finally:
        scene.judge()
        story = scene.job.story()
        scene.close()
        stage.mend()
    return Trial(seconds, tuple(scene.wrong), tuple(scene.notes), story)


_ON_SILENCE = "one of several members before 3.5.13 may end leases early, so a silent loss takes two lease times there"
_HEAD = f"{'fault':<54} {'':<20} {'median':>9}  {'of all trials':<24} {'budget':>8}"


def _row(case: Case, arm: Arm, trials: list[Trial]) -> str:
    finished = [trial.seconds for trial in trials if trial.seconds is not None]
    middle = f"{median(finished):.3f} s" if len(finished) > len(trials) / 2 else f"> {arm.limit_s:.0f} s"
    each = " ".join("never" if trial.seconds is None else f"{trial.seconds:.2f}" for trial in trials)
    budget = _budget(case) if arm is OURS else ""
    verdict = _verdict(case, trials, finished) if arm is OURS else ""
    notes = "; ".join(dict.fromkeys(note for trial in trials[-1:] for note in trial.notes))
    return f"{case.title:<54} {arm.name:<20} {middle:>9}  {each:<24} {budget:>8}  {verdict}  {notes}".rstrip()


def _budget(case: Case) -> str:
    if case.no_step_lost:
        return "no loss"
    return f"{case.budget_s} s" if case.budget_s else ""


def _verdict(case: Case, trials: list[Trial], finished: list[float]) -> str:
    if any(trial.wrong for trial in trials):
        return "WRONG "
    if case.no_step_lost:
        return "met"
    if case.budget_s is None:
        return ""
    return "met" if len(finished) == len(trials) and median(finished) <= case.budget_s else "MISSED"


def _tell_what_is_wrong(trial: Trial, tell_all: bool) -> None:
    if trial.wrong:
        print("    wrong:", *trial.wrong, sep="\n      ")
    if trial.wrong or tell_all:
        print("    what happened:", *trial.story.splitlines(), sep="\n      ", flush=True)


def _as_json(case: Case, trials: list[Trial]) -> dict[str, Any]:
    return {
        "title": case.title,
        "budget_s": case.budget_s,
        "no_step_lost": case.no_step_lost,
        "seconds": [trial.seconds for trial in trials],
        "wrong": [list(trial.wrong) for trial in trials],
        "notes": [list(trial.notes) for trial in trials],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NoHosts, FileNotFoundError) as reason:
        sys.exit(f"faults.py: {reason}")
