"""Samplers and streams whose position is part of a checkpoint."""
