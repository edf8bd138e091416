"""Putting a script into the parallel classes: prepare, and standing in for torch's."""
