"""Cross-entropy of a linear head: ``-log softmax(x @ weight.T)[target]``.

The head of GPT-2 has 50257 columns, so its logits dwarf every other tensor of a training step; a
fused kernel never holds them (Wijmans et al. 2024, https://arxiv.org/abs/2411.09009). This
reference does, in fp32.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Targets with this value count for nothing (PyTorch's and Hugging Face's convention)."""


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """Loss of predicting ``targets`` from ``x``.

    Args:
        x: ``[..., C]`` final hidden states.
        weight: ``[V, C]`` head.
        targets: ``[...]`` integers in ``[0, V)`` or :data:`IGNORE_INDEX`.
        reduction: ``"mean"`` over the targets that count (0 when none does), ``"sum"`` or
            ``"none"`` (0 where ignored).

    Returns:
        A scalar, or ``[...]`` for ``"none"``; fp32 (fp64 for fp64 inputs).
    """
    logits = F.linear(x, weight)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none" if reduction == "none" else "sum",
    )
    if reduction == "none":
        return loss.view(targets.shape)
    if reduction == "mean":
        return loss / (targets != IGNORE_INDEX).sum().clamp(min=1)
    return loss
