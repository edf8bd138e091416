"""``many_lines.py COUNT``: prints COUNT lines of different lengths as fast as it can."""

import os
import sys

RANK = os.environ["RANK"]

for number in range(int(sys.argv[1])):
    print(f"rank {RANK} line {number} {'x' * (number % 97)}.")
