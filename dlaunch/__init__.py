"""dlaunch: an elastic launcher for PyTorch jobs that do not stop.

For training scripts: ``dlaunch.prepare`` puts a model, an optimizer and a loader into the way that ``--parallel``
names; ``dlaunch.checkpoint`` saves and loads; ``dlaunch.parallel`` holds the classes. Nothing of it, nor anything else,
is imported before it is used: every worker imports this package before its script.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from typing import Any

    from dlaunch.parallel import checkpoint as checkpoint
    from dlaunch.parallel.scripts.prepare import prepare as prepare

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        from dlaunch.parallel import checkpoint  # noqa: PLC0415  -- torch

        return checkpoint
    if name == "prepare":
        from dlaunch.parallel.scripts.prepare import prepare  # noqa: PLC0415  -- torch

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
