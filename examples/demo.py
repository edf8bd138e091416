"""Watch a training job survive: two workers learn to read digits, one of them is killed on the way, the job goes on.

    make demo                          # or: python examples/demo.py
    make demo ARGS=--no-chaos          # nobody is killed
    make demo ARGS="--epochs 40"

What runs is nothing special: `dlaunch run --nproc-per-node 2 --max-restarts 3 examples/train_digits.py ...`. This
program only starts it, looks on, and plays the fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
DLAUNCH = Path(sys.executable).parent / "dlaunch"
VICTIM = "1"  # the rank that is killed


@dataclass
class Seen:
    """What the demo has seen of the job so far."""

    epochs: int = 0
    accuracy: float | None = None  # of the trained network, at the end
    killed_at: float | None = None  # seconds on the monotonic clock
    back_after_s: float | None = None  # from the kill to the next epoch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on two workers, kill one on the way, see the job go on.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--kill-after", type=int, default=3, metavar="EPOCHS", help="when the worker is killed")
    parser.add_argument("--target-accuracy", type=float, default=0.95, help="the demo fails below it")
    parser.add_argument("--no-chaos", action="store_true", help="kill nobody")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for checkpoint, logs and summary")
    return parser.parse_args()


def command_line(arguments: argparse.Namespace) -> list[str]:
    """The job, as one would type it."""
    folder = arguments.folder
    return [
        *[str(DLAUNCH), "run", "--nproc-per-node", "2", "--max-restarts", "3", "--preload", "sklearn.datasets"],
        *["--log-dir", str(folder / "logs"), "--summary-json", str(folder / "summary.json")],
        str(EXAMPLES / "train_digits.py"),
        *["--epochs", str(arguments.epochs), "--checkpoint", str(folder / "digits.pt")],
        *["--target-accuracy", str(arguments.target_accuracy)],
    ]


def say(text: str) -> None:
    """Print a line of the demo's own, told apart from the job's."""
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{bold}>>> {text}{plain}", flush=True)


def read_record(folder: Path) -> dict[str, Any]:
    """What dlaunch keeps on disk about the run: its state, the attempt, the workers' process ids."""
    (path,) = (folder / "logs").glob("*/record.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def start_anew(folder: Path) -> None:
    """Remove what an earlier demo left: with its checkpoint, there would be nothing left to train."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for name in ("digits.pt", "summary.json"):
        (folder / name).unlink(missing_ok=True)


def watch(job: subprocess.Popen[str], arguments: argparse.Namespace) -> Seen:
    """Show the job's output line by line, and kill a worker once when the training has got going."""
    seen = Seen()
    for line in job.stdout or ():
        print(line, end="", flush=True)
        if found := re.search(r"\baccuracy (\d\.\d{4})\s*$", line):
            seen.accuracy = float(found[1])
        if re.search(r"\bepoch \d+ ", line):
            seen.epochs += 1
            note_the_return(seen, arguments.folder)
            if seen.epochs == arguments.kill_after and not arguments.no_chaos:
                kill_a_worker(seen, arguments.folder)
    return seen


def kill_a_worker(seen: Seen, folder: Path) -> None:
    """What a fault does: no warning, no chance to clean up."""
    pid = read_record(folder)["workers"][VICTIM]
    os.kill(pid, signal.SIGKILL)
    seen.killed_at = time.monotonic()
    say(f"kill -9 {pid}: the worker with rank {VICTIM} is gone.")


def note_the_return(seen: Seen, folder: Path) -> None:
    """The first epoch of the second attempt is the sign that the training is back."""
    if seen.killed_at is not None and seen.back_after_s is None and read_record(folder)["attempt"] > 0:
        seen.back_after_s = time.monotonic() - seen.killed_at
        say(f"{seen.back_after_s:.2f} s after the kill, the next epoch is done: the job goes on from its checkpoint.")


def judge(seen: Seen, summary: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """What went wrong, in sentences; nothing if the demo showed what it should."""
    wrong = []
    if summary["exit_code"] != 0:
        wrong.append(f"the job ended with exit code {summary['exit_code']}: {summary['reason']}")
    if seen.accuracy is None or seen.accuracy < arguments.target_accuracy:
        wrong.append(f"the accuracy is {seen.accuracy}, not {arguments.target_accuracy} or better")
    if not arguments.no_chaos and (seen.back_after_s is None or summary["restarts_used"] != 1):
        wrong.append("the job was not restarted exactly once after the kill")
    return wrong


def main() -> int:
    arguments = parse_arguments()
    if not arguments.no_chaos and not 0 < arguments.kill_after < arguments.epochs:
        sys.exit(f"demo: --kill-after {arguments.kill_after} must lie between 1 and the number of epochs minus 1.")
    start_anew(arguments.folder)

    command = command_line(arguments)
    say(" ".join(command))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        try:
            seen = watch(job, arguments)
        except KeyboardInterrupt:  # dlaunch got the Ctrl-C too, and ends the job
            return job.wait()

    summary = json.loads((arguments.folder / "summary.json").read_text())
    wrong = judge(seen, summary, arguments)
    if seen.back_after_s is not None:
        say(
            f"from the kill to the next finished epoch: {seen.back_after_s:.2f} s; restarts: {summary['restarts_used']}"
        )
    say(f"accuracy on digits that it has never seen: {seen.accuracy}; exit code: {job.returncode}")
    for sentence in wrong:
        say(f"not as it should be: {sentence}")
    return 1 if wrong else job.returncode


if __name__ == "__main__":
    sys.exit(main())
