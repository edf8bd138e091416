"""``python -m dlaunch`` is the ``dlaunch`` command."""

import sys

from dlaunch.launcher.main import main

sys.exit(main())
