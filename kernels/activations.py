"""The activations of GPT-2's MLP, in PyTorch and inside kernels.

``gelu`` is exact, ``x * Phi(x)`` by the error function; ``gelu_new``, ``gelu_fast`` and
``gelu_pytorch_tanh`` are one tanh approximation written three ways (Hendrycks & Gimpel 2016,
https://arxiv.org/abs/1606.08415). In kernels ``0.5 * (1 + tanh(u))`` is ``sigmoid(2 u)``, the same
function, which needs no library of the vendor's.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.jit import tl, triton

ACTIVATIONS: dict[str, str] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's ``activation_function`` names, and the function each means."""

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": F.gelu,
    "tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@triton.jit
def activate(
    x,  # fp32
    FUNCTION: tl.constexpr,  # a value of ACTIVATIONS, or "none"
):
    if FUNCTION == "erf":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if FUNCTION == "tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if FUNCTION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    if FUNCTION == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def slope(
    x,  # fp32
    FUNCTION: tl.constexpr,  # a value of ACTIVATIONS
):
    """The derivative of :func:`activate` at x."""
    if FUNCTION == "erf":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        d = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    if FUNCTION == "tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        d = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if FUNCTION == "relu":
        d = tl.where(x > 0.0, 1.0, 0.0)
    if FUNCTION == "silu":
        s = tl.sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    return d
