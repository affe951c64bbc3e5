"""One file per operation: its formula, its cost, its PyTorch reference and its Triton kernels; see
kernels/README.md for the reading order."""

from gptile.kernels.activations import ACTIVATIONS
from gptile.kernels.linear_cross_entropy import IGNORE_INDEX
from gptile.kernels.ops import Ops

__all__ = ["ACTIVATIONS", "IGNORE_INDEX", "Ops"]
