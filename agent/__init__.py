"""What runs once on each node: decides from events, owns the worker processes, pumps their output."""
