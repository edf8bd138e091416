"""The environment that leads a starting Python interpreter through our hook, and the way back from it.

CPython's ``site`` imports ``sitecustomize`` from the first folder of PYTHONPATH that has one: the folder ``hook``. The
variables say what the interpreter is to become; they are gone before any line of the user's runs.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PREFIX = "_DLAUNCH_"
ROOT = "_DLAUNCH_ROOT"  # the folder that holds the package dlaunch; other interpreters may not have it installed
PYTHONPATH = "_DLAUNCH_PYTHONPATH"  # the user's own; absent where it is not set
AGENT = "_DLAUNCH_AGENT"  # descriptor of the socket to the agent: become a warm starter
CHANNEL = "_DLAUNCH_CHANNEL"  # descriptor of the side channel: become a worker
PRELOAD = "_DLAUNCH_PRELOAD"  # modules that the user asks for, with commas between
TORCH = "_DLAUNCH_TORCH"  # set: preload torch too
ENTRY = "_DLAUNCH_ENTRY"  # "module:function" to call in each worker before the script
ENTRY_PRELOAD = "_DLAUNCH_ENTRY_PRELOAD"  # what that is quicker with

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120  -- pathlib is slow


def package_root() -> str:
    """The folder that has to be on ``sys.path`` for ``import dlaunch``."""
    return os.path.dirname(_PACKAGE)  # noqa: PTH120


def hooked(environment: Mapping[str, str], private: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with the hook in front of PYTHONPATH, and with what the hook needs to know."""
    folder = os.path.join(_PACKAGE, "worker", "hook")  # noqa: PTH118
    result = {**environment, **private, ROOT: package_root()}
    own = environment.get("PYTHONPATH")
    result["PYTHONPATH"] = f"{folder}{os.pathsep}{own}" if own else folder  # an empty entry would mean "here"
    if own is not None:
        result[PYTHONPATH] = own
    return result


def take_private(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Undo `hooked` in place; what the hook needs to know."""
    private = {name: environment.pop(name) for name in list(environment) if name.startswith(PREFIX)}
    if PYTHONPATH in private:
        environment["PYTHONPATH"] = private[PYTHONPATH]
    else:
        environment.pop("PYTHONPATH", None)
    return private
