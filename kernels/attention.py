"""Causal self-attention over whole sequences, as in training and an uncached forward pass.

``out[b, i, h] = sum_{j <= i} softmax_j(scale * q[b, i, h] . k[b, j, h]) * v[b, j, h]``

q, k and v are strided views of the packed projection, never copied. FLOPs: ``4 * B * H * T^2 * D``
over the full square, half of it causal; an ideal kernel reads q, k, v once and writes out once
(FlashAttention-2, https://arxiv.org/abs/2307.08691). Scores and softmax are fp32 for 16-bit inputs,
which is what Hugging Face's ``reorder_and_upcast_attn`` asks for.
"""

import torch.nn.functional as F
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Attend causally.

    Args:
        q, k, v: ``[B, T, H, D]``, any strides.
        scale: factor on the scores.
        dropout_p: probability of dropping an attention weight (0 outside training).

    Returns:
        ``[B, T, H * D]``.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        scale=scale,
        dropout_p=dropout_p,
    )
    return out.transpose(1, 2).flatten(2)
