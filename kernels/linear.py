"""Affine maps in the ``nn.Linear`` layout: ``y = x @ weight.T + bias``, with or without activation.

For M rows: ``2 * M * N * K`` FLOPs; reads ``M * K + N * K + N`` and writes ``M * N`` elements. At
M = 1 (decode) the weight is nearly all the traffic; at many rows the product is compute bound.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""Hugging Face's ``activation_function`` names. ``gelu`` is the exact erf form; ``gelu_new``,
``gelu_fast`` and ``gelu_pytorch_tanh`` are one tanh approximation written three ways
(Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415)."""


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]``, ``weight [N, K]``, ``bias [N]`` -> ``[..., N]``."""
    return F.linear(x, weight, bias)


def linear_activation_reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """``activation(x @ weight.T + bias)``; ``activation`` is a key of :data:`ACTIVATIONS`."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))
