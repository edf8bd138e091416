"""Kill a job that trains and saves, again and again, and look whether anything was ever lost.

    python benchmarks/checkpoint_kills.py --kills 1000 --seed 1 --kind sampler

Each life is forked from this process, which holds torch already: one process that plays all ranks of a world, or
several real ranks with a process group, of which each writes its shard. It loads the last checkpoint, goes on through
the epoch as a world of another size, and saves after every step in the background until it is killed: at a random
moment, at the n-th call that touches the file system, or by the kernel at byte k of a file (RLIMIT_FSIZE). Of several
ranks a random one is killed, and then the others, as a launcher would. After each death:

- the last good checkpoint is at least the last one that was reported as published, and nothing is damaged;
- its tensors, and the shards of its ranks put together, are those of its step;
- the samples that it says were delivered are exactly the first ones of the epoch's order, each once.

The lives themselves check that each step has the next samples of the order, and that each epoch had all of them once.
Exit status 1 and the seed of the life if any of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from checkpoint_lives import KINDS, REPORT, live_alone, live_together, order_of, rows_of, weights_of

from dlaunch.parallel import CollectiveError, checkpoint

MODES = ("moment", "call", "byte")
_ITSELF, _LEFT_ALONE = 7, 8  # exit codes: it failed by itself; another rank was gone
_KILLED = {-signal.SIGKILL, -signal.SIGXFSZ}


def live(
    directory: Path, report: int, kind: str, mode: str, seed: int, rank: int, world_size: int, store: Path
) -> NoReturn:
    """One process of a life; never returns."""
    rng = random.Random(seed)
    victim = rng.randrange(world_size)
    if mode == "call" and rank == victim:
        die_at_call(rng.randint(1, 150), str(directory))
    if mode == "byte" and rank == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit = rng.randint(0, 360_000 if rank == 0 else 30_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng = random.Random(seed + 1)  # the same on all ranks
    if world_size == 1:
        live_alone(directory, report, rng, kind)
    live_together(directory, report, rng, kind, rank, world_size, store)


def die_at_call(number: int, directory: str) -> None:
    """SIGKILL to this process right before the n-th call below ``directory`` that Python's audit events know."""
    left = [number]

    def count(_event: str, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(directory):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def check(directory: Path, at_least: int) -> checkpoint.Checkpoint | None:
    """The last good checkpoint; raises AssertionError if anything was lost or damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", checkpoint.DamagedCheckpointWarning)
        found = checkpoint.latest(directory)
    if found is None:
        assert at_least <= 0, f"step {at_least} was published, and nothing is there"
        return None
    assert found.step >= at_least, f"step {at_least} was published, and the last good one is {found.step}"
    state = found.read_whole()
    for name, expected in weights_of(found.step).items():
        assert torch.equal(state["weights"][name], expected), f"{name} of step {found.step} is not what was saved"
    if found.is_sharded:
        assert torch.equal(state["rows"], rows_of(found.step)), f"the shards of step {found.step} are wrong"
    position, delivered = state["dealer"]["position"], state["delivered"].tolist()
    expected_samples = order_of(state["dealer"]["epoch"])[:position]
    assert sorted(delivered) == sorted(expected_samples), f"samples of step {found.step} are wrong"
    return found


class Life:
    """The processes of one life, and what they report."""

    def __init__(self, directory: Path, kind: str, mode: str, seed: int) -> None:
        rng = random.Random(~seed)
        self.world_size = rng.choice((1, 1, 2, 3))
        self.told = b""
        self._store = tempfile.NamedTemporaryFile(prefix="kills-store")  # noqa: SIM115  -- closed with the life
        self._reading, writing = os.pipe()
        self.pids = [self._born(directory, writing, kind, mode, seed, rank) for rank in range(self.world_size)]
        os.close(writing)
        self._ends = [os.pidfd_open(pid) for pid in self.pids]

    def _born(self, directory: Path, report: int, kind: str, mode: str, seed: int, rank: int) -> int:
        if (pid := os.fork()) != 0:
            return pid
        os.close(self._reading)
        try:
            live(directory, report, kind, mode, seed, rank, self.world_size, Path(self._store.name))
        except CollectiveError:
            os._exit(_LEFT_ALONE)
        except BaseException as error:
            os.write(2, f"rank {rank} of {self.world_size} itself failed: {error!r}\n".encode())
            os._exit(_ITSELF)

    def wait(self, reports: int | None = None) -> None:
        """Until so many steps were reported, or a process has ended."""
        while reports is None or len(self.told) < reports * REPORT.size:
            ready, _, _ = select.select([self._reading, *self._ends], [], [])
            if self._reading in ready:
                if not (data := os.read(self._reading, 1 << 16)):
                    return
                self.told += data
            elif ready:
                return

    def kill(self, rng: random.Random) -> None:
        """One first, the others a little later, and take in what they reported."""
        order = rng.sample(self.pids, len(self.pids))
        for number, pid in enumerate(order):
            if number == 1:
                time.sleep(rng.random() * 0.01)
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        while data := os.read(self._reading, 1 << 16):
            self.told += data

    def statuses(self) -> list[int]:
        """What became of the processes, as exit codes (negative: a signal)."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        for descriptor in (self._reading, *self._ends):
            os.close(descriptor)
        self._store.close()
        return codes

    @property
    def published(self) -> int:
        """The last step that was reported."""
        whole = self.told[: len(self.told) // REPORT.size * REPORT.size]
        return max((step for (step,) in REPORT.iter_unpack(whole)), default=-1)


def ended_badly(codes: Sequence[int]) -> bool:
    """Whether a life ended by itself instead of being killed, or one of its processes did."""
    return not _KILLED & {*codes} or not {*codes} <= {*_KILLED, _LEFT_ALONE}


def kill_once(directory: Path, kind: str, mode: str, seed: int, known: int) -> tuple[checkpoint.Checkpoint | None, int]:
    """Run and kill one life; the last good checkpoint afterwards, and how many processes there were."""
    rng = random.Random(~seed - 1)
    life = Life(directory, kind, mode, seed)
    try:
        life.wait({"moment": 1, "call": None, "byte": 4}[mode])  # it may be that no file is as long as the limit
        if mode == "moment":
            time.sleep(rng.random() * 0.04)  # the random moment
            if rng.random() < 0.3 and (found := check(directory, known)):
                known = max(known, found.step)  # a reader beside the writer
    finally:
        life.kill(rng)
        codes = life.statuses()
    assert not ended_badly(codes), f"the life ended by itself (exit codes {codes})"
    return check(directory, max(known, life.published)), life.world_size


def main() -> int:
    """Run the kills; print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="what deals the samples out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, step, survived_by, found = time.monotonic(), 0, Counter[str](), None
    with tempfile.TemporaryDirectory(prefix="checkpoint-kills") as temporary:
        directory = Path(temporary) / "checkpoints"
        for number in range(options.kills):
            seed = options.seed * 1_000_003 + number
            mode = random.Random(seed).choice(MODES)
            try:
                found, ranks = kill_once(directory, options.kind, mode, seed, step)
            except (AssertionError, checkpoint.CheckpointError, checkpoint.DamagedCheckpointWarning) as error:
                print(f"life {number} (seed {seed}, {mode}): {error}", file=sys.stderr)
                return 1
            step = found.step if found else 0
            survived_by[f"{mode}, {'one process' if ranks == 1 else 'several ranks'}"] += 1
        entries = len(list(directory.iterdir()))
        epochs = found.read_state()["epochs"] if found else 0
    summary = {"kills": options.kills, "kind": options.kind, "by": dict(survived_by), "steps": step, "epochs": epochs}
    print(json.dumps({**summary, "entries_left": entries, "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
