"""One file per operation: its formula, its traffic and its PyTorch reference."""

from gptile.kernels.linear import ACTIVATIONS
from gptile.kernels.linear_cross_entropy import IGNORE_INDEX
from gptile.kernels.ops import Ops

__all__ = ["ACTIVATIONS", "IGNORE_INDEX", "Ops"]
