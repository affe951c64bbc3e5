"""LayerNorm over the last dimension, alone and fused with the residual addition before it.

``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` with the biased variance, as in
Ba et al. 2016 (https://arxiv.org/abs/1607.06450). Statistics are taken in fp32 for 16-bit inputs.
PyTorch's CPU kernel computes ``x * rstd - mean * rstd``, which cancels where the mean is thousands
of times the spread; GPT-2's residual stream is not like that.

Memory bound. For N elements in rows of C: layer_norm reads N and writes N; add_layer_norm reads
2 N and writes 2 N, where the unfused pair moves 3 N + 2 N.
"""

import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise ``x [..., C]`` with ``weight [C]`` and ``bias [C]``; same shape and dtype out."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``delta`` to the residual stream ``x`` and normalise the sum (all ``[..., C]``).

    Returns:
        ``(x + delta, layer_norm(x + delta))``: the new residual stream and the sublayer's input.
    """
    total = x + delta
    return total, layer_norm_reference(total, weight, bias, eps)
