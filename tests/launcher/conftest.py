"""Lets the tests of the launcher share values."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.launcher.failures`
