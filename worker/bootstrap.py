"""What our hook does in a starting interpreter: leave no trace, then become a warm starter or a worker.

It runs inside ``import sitecustomize``, which CPython's ``site`` does before the script. When `begin` leaves, CPython
goes on exactly as it would have without us. Our modules are set aside early, so nothing here or below may import one
of ours later than at its top.
"""

from __future__ import annotations

import os
import sys

from .capture import Capture
from .descriptors import is_socket, out_of_the_way
from .hooked import AGENT, CHANNEL, ENTRY, take_private

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

_NAME = "sitecustomize"


def begin(folder: str, modules_before: AbstractSet[str]) -> None:
    """Take the place of the hook in ``folder``; ``modules_before`` were in ``sys.modules`` when it was imported.

    Raises what the user's own sitecustomize raises. Where there is none, that is the ImportError which ``site`` takes
    for an answer, and which makes importlib forget that our hook was ever found.
    """
    private = take_private(os.environ)
    capture = Capture()
    if is_socket(agent := int(private.get(AGENT, -1))):
        from .birth import give_up  # noqa: PLC0415  -- a worker of the exec method need not pay for these
        from .warm import serve  # noqa: PLC0415

        _leave_no_trace(folder, {name for name in sys.modules if name.partition(".")[0] == "dlaunch"})
        try:
            raised = _users_own()
            serve(agent, private, capture, modules_before)
        except BaseException as error:
            give_up(error)  # else CPython would go on and run the script here, in what is to be the workers' parent
        if raised is not None:
            raise raised
        return
    if is_socket(channel := int(private.get(CHANNEL, -1))):
        capture.begin(out_of_the_way(channel))
    if entry := private.get(ENTRY):
        from .entry import call  # noqa: PLC0415

        _leave_no_trace(folder, set(sys.modules) - modules_before)
        call(entry)
    else:
        _leave_no_trace(folder, set(sys.modules) - modules_before)
    __import__(_NAME)


def _users_own() -> BaseException | None:
    """Import the user's sitecustomize; what it raised."""
    try:
        __import__(_NAME)
    except BaseException as error:
        return error
    return None


def _leave_no_trace(folder: str, modules: Iterable[str]) -> None:
    """Make importlib forget the hook's folder, ours, and these modules. What holds them keeps them."""
    for name in {_NAME, *modules}:
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    package = os.path.dirname(os.path.dirname(folder))  # noqa: PTH120
    root = os.path.dirname(package)  # noqa: PTH120
    for entry in list(sys.path_importer_cache):
        if entry == package or entry.startswith(package + os.sep) or (entry == root and root not in sys.path):
            del sys.path_importer_cache[entry]
