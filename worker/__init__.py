"""What runs inside the worker processes and their parents: guard, starters, bootstrap, error capture."""
