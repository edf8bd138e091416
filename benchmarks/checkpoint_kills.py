"""Kill a process that trains and saves, again and again, and look whether anything was ever lost.

    python benchmarks/checkpoint_kills.py --kills 1000 --seed 1

Each life is forked from this process, which holds torch already. It loads the last checkpoint, goes on through the
epoch as a world of another size, and saves after every step in the background until it is killed: at a random moment,
at the n-th call that touches the file system, or by the kernel at byte k of a file (RLIMIT_FSIZE). After each death:

- the last good checkpoint is at least the last one that was reported as published, and nothing is damaged;
- its tensors are those of its step;
- the samples that it says were delivered are exactly the first ones of the epoch's order, each once.

Exit status 1 and the seed of the life if any of that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from dlaunch.parallel import checkpoint
from dlaunch.parallel.data.sampler import ElasticDistributedSampler

EPOCH = range(997)
MODES = ("moment", "call", "byte")
_REPORT = struct.Struct("<q")


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """What a model has after ``step`` steps; some 300 KB."""
    generator = torch.Generator().manual_seed(step)
    return {f"layer{number}": torch.randn(128, 128, generator=generator) for number in range(5)}


def one_step(samplers: list[ElasticDistributedSampler], taken: list[Iterator[int]], batch_size: int) -> list[int]:
    """The samples that all ranks take in a step."""
    samples = [
        index for share in taken for index in [next(share, None) for _ in range(batch_size)] if index is not None
    ]
    for sampler in samplers:
        sampler.advance(batch_size)
    return samples


def train(directory: Path, report: int, rng: random.Random) -> NoReturn:
    """Load, train and save for ever."""
    world_size, batch_size = rng.randint(1, 6), rng.randint(1, 60)
    samplers = [ElasticDistributedSampler(EPOCH, world_size, rank, seed=3) for rank in range(world_size)]
    found = checkpoint.load(directory)
    step, delivered = 0, []
    if found is not None:
        step, delivered = found.step, found.state["delivered"].tolist()
        for sampler in samplers:
            sampler.load_state_dict(found.state["sampler"])
    os.write(report, _REPORT.pack(-1))
    saver = checkpoint.Saver(directory, keep_last=3, keep_every=100)
    while True:
        if samplers[0].position == len(EPOCH):
            delivered = []
            for sampler in samplers:
                sampler.set_epoch(sampler.epoch + 1)
        taken = [iter(sampler) for sampler in samplers]
        while samplers[0].position < len(EPOCH):
            delivered += one_step(samplers, taken, batch_size)
            step += 1
            state = {"weights": weights_of(step), "sampler": samplers[0], "delivered": torch.tensor(delivered)}
            saver.save(state, step)
            saver.wait()
            os.write(report, _REPORT.pack(step))


def live(directory: Path, report: int, mode: str, seed: int) -> NoReturn:
    """One life, in a forked process; never returns."""
    rng = random.Random(seed)
    if mode == "call":
        die_at_call(rng.randint(1, 150), str(directory))
    if mode == "byte":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit = rng.randint(0, 360_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    train(directory, report, rng)


def die_at_call(number: int, directory: str) -> None:
    """SIGKILL to this process right before the n-th call below ``directory`` that Python's audit events know."""
    left = [number]

    def count(_event: str, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(directory):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def check(directory: Path, at_least: int) -> int:
    """The step of the last good checkpoint; raises AssertionError if anything was lost or damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", checkpoint.DamagedCheckpointWarning)
        found = checkpoint.latest(directory)
    if found is None:
        assert at_least <= 0, f"step {at_least} was published, and nothing is there"
        return 0
    assert found.step >= at_least, f"step {at_least} was published, and the last good one is {found.step}"
    state = found.read_state()
    for name, expected in weights_of(found.step).items():
        assert torch.equal(state["weights"][name], expected), f"{name} of step {found.step} is not what was saved"
    alone = ElasticDistributedSampler(EPOCH, 1, 0, seed=state["sampler"]["seed"])
    alone.set_epoch(state["sampler"]["epoch"])
    order, position = list(alone), state["sampler"]["position"]
    assert sorted(state["delivered"].tolist()) == sorted(order[:position]), f"samples of step {found.step} are wrong"
    return found.step


def kill_once(directory: Path, mode: str, seed: int, known: int) -> int:
    """Run and kill one life; the step of the last good checkpoint afterwards."""
    rng = random.Random(~seed)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            live(directory, writing, mode, seed)
        except BaseException as error:
            os.write(2, f"the life itself failed: {error!r}\n".encode())
            os._exit(7)  # reached by no kill
    os.close(writing)
    with open(reading, "rb") as reports:  # noqa: PTH123  -- a descriptor
        told = b""
        try:
            if mode == "moment" and reports.read(_REPORT.size):
                time.sleep(rng.random() * 0.04)  # the random moment
                if rng.random() < 0.3:
                    known = max(known, check(directory, known))  # a reader beside the writer
            if mode == "byte":
                told = reports.read(_REPORT.size * 4)  # it may be that no file is as long as the limit
        finally:
            if mode != "call":
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        told += reports.read()
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise AssertionError(f"the life ended by itself (wait status {status})")
    whole = told[: len(told) // _REPORT.size * _REPORT.size]
    published = max((step for (step,) in _REPORT.iter_unpack(whole)), default=-1)
    return check(directory, max(known, published))


def main() -> int:
    """Run the kills; print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, step, survived_by = time.monotonic(), 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="checkpoint-kills") as temporary:
        directory = Path(temporary) / "checkpoints"
        for number in range(options.kills):
            seed = options.seed * 1_000_003 + number
            mode = random.Random(seed).choice(MODES)
            try:
                step = kill_once(directory, mode, seed, step)
            except (AssertionError, checkpoint.CheckpointError, checkpoint.DamagedCheckpointWarning) as error:
                print(f"life {number} (seed {seed}, {mode}): {error}", file=sys.stderr)
                return 1
            survived_by[mode] += 1
        entries = len(list(directory.iterdir()))
    summary = {"kills": options.kills, "by": dict(survived_by), "steps": step, "entries_left": entries}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
