"""Peak memory of a rank that trains with our DistributedDataParallel beside torch's.

    python benchmarks/parallel_ddp_memory.py --model mlp

Each contestant trains in processes of its own. What counts is the proportional set size (PSS): memory that ranks share
is counted once. It is sampled all the time, and the largest sample of rank 0 is told. What glibc keeps of freed memory
differs from run to run by tens of per cent, for every contestant; ``--mmap-threshold 1048576`` holds it still.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_ddp import CONTESTANTS, make_step
from parallel_models import MODELS


def proportional_set_mib() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/smaps_rollup has no line for Pss")


class Peak:
    """The largest sample, taken by a thread without a pause until `stop`."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(0.001):
            self.mib = max(self.mib, proportional_set_mib())

    def stop(self) -> float:
        """End sampling and return the peak in MiB."""
        self._stopped.set()
        self._thread.join()
        return self.mib


def work(rank: int, world_size: int, store: str, name: str, model: str, steps: int, told: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    step, _ = make_step(name, model, rank)
    for _ in range(3):
        step()
    peak = Peak()
    for _ in range(steps):
        step()
    mib = peak.stop()
    if rank == 0:
        Path(told).write_text(str(mib))
    dist.barrier()
    os._exit(0)  # torch's reducers would join gloo's threads while they hold the interpreter's lock


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the peak memory of data-parallel classes.")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=7, help="runs of each contestant, in turns")
    parser.add_argument("--mmap-threshold", help="glibc: give back what is larger than so many bytes when it is freed")
    arguments = parser.parse_args()
    if arguments.mmap_threshold:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = arguments.mmap_threshold  # read at the start of the ranks' server
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "parallel_ddp"])
    peaks: dict[str, list[float]] = {name: [] for name in arguments.contestants}
    for _ in range(arguments.repeats):
        for name, found in peaks.items():
            found.append(measure(name, arguments))
    print(f"{arguments.model}, {arguments.world_size} ranks: peak of rank 0 in MiB, {arguments.repeats} runs each")
    for name, found in peaks.items():
        print(f"  {name:20} median {statistics.median(found):6.1f}  from {min(found):6.1f} to {max(found):6.1f}")


def measure(name: str, arguments: argparse.Namespace) -> float:
    """The peak of rank 0 in MiB, in processes of their own."""
    with tempfile.TemporaryDirectory() as directory:
        told = f"{directory}/peak"
        mp.start_processes(
            work,
            args=(arguments.world_size, f"{directory}/store", name, arguments.model, arguments.steps, told),
            nprocs=arguments.world_size,
            start_method="forkserver",  # torch is imported once, and its pages count a part for each process
        )
        return float(Path(told).read_text())


if __name__ == "__main__":
    main()
