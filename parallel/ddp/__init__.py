"""DistributedDataParallel: gradients averaged while the backward runs."""
