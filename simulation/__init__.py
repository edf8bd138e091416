"""A thousand agents in one process: their real code, on a virtual clock, with seeded faults and checked invariants."""
