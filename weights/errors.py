"""What goes wrong with files from outside."""

from gptile.model.errors import UserError


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or not the model its config describes."""
