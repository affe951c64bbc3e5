"""Hugging Face files to model and back."""

from gptile.weights.checkpoint import Checkpoint, load, open_checkpoint
from gptile.weights.errors import CheckpointError
from gptile.weights.save import save_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "load", "open_checkpoint", "save_checkpoint"]
