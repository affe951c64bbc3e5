"""One file per operation: its formula, its traffic, its PyTorch reference and, where there is one
yet, its Triton kernel."""

from gptile.kernels.activations import ACTIVATIONS
from gptile.kernels.linear_cross_entropy import IGNORE_INDEX
from gptile.kernels.ops import Ops

__all__ = ["ACTIVATIONS", "IGNORE_INDEX", "Ops"]
