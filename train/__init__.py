"""A minimal trainer: what the demo checkpoint needs, exact to the bit on resume."""

from gptile.train.config import TrainConfig
from gptile.train.loop import train

__all__ = ["TrainConfig", "train"]
