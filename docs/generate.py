"""Writes the generated parts of the docs anew: ``make docs``. With --check, only says whether they are stale."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from dlaunch.agent.machine import transition_table
from dlaunch.agent.node_machine import NODE_TRANSITIONS

DOCS = Path(__file__).parent
PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("architecture.md", "transition table"): transition_table,
    ("protocol.md", "node transition table"): lambda: transition_table(NODE_TRANSITIONS),
}


def with_part(text: str, name: str, part: str) -> str:
    """``text`` with what stands between the part's two marks replaced; raises ValueError where there are none."""
    marks = rf"(<!-- generated: {re.escape(name)} \(make docs\) -->\n).*?(<!-- end of generated part -->)"
    new, count = re.subn(marks, lambda found: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"there is not one place for the generated part {name!r}")
    return new


def stale_pages() -> dict[Path, str]:
    """Pages that are not as they should be, with what they should say."""
    stale = {}
    for (page, name), part in PARTS.items():
        path = DOCS / page
        text = stale.get(path, path.read_text(encoding="utf-8"))
        new = with_part(text, name, part())
        if new != text:
            stale[path] = new
    return stale


def main() -> int:
    """Write what is stale, or with --check only tell."""
    stale = stale_pages()
    for path, text in stale.items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name} was stale")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
