"""dlaunch: an elastic launcher for PyTorch jobs that do not stop."""

__version__ = "0.1.0"
