"""What can go wrong with a checkpoint."""

from dlaunch.errors import DlaunchError, ExitCode


class CheckpointError(DlaunchError):
    """A checkpoint could not be written or read; says which, why, and what to do."""

    exit_code = ExitCode.TEMPORARY


class DamagedCheckpoint(CheckpointError):
    """A published checkpoint is not whole: a file is missing, short or changed."""


class DamagedCheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over."""
