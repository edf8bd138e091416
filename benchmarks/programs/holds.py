"""``holds.py FOLDER``: writes ``running_<rank>``, and ends when ``finish`` is there."""

import os
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[1])

(FOLDER / f"running_{os.environ['RANK']}").touch()
while not (FOLDER / "finish").exists():
    time.sleep(0.02)
