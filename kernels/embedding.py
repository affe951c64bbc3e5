"""Token and position embedding: ``out[b, t] = wte[ids[b, t]] + wpe[positions[b, t]]``.

Memory bound: reads ``2 * B * T * C`` elements (plus the indices), writes ``B * T * C``.
"""

import torch.nn.functional as F
from torch import Tensor


def embedding_reference(ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
    """Look up and add both embeddings.

    Args:
        ids: ``[B, T]`` integer token ids, each in ``[0, V)``.
        positions: ``[T]`` or ``[B, T]`` integer positions, each in ``[0, n_positions)``.
        wte: ``[V, C]`` token embedding.
        wpe: ``[n_positions, C]`` position embedding.

    Returns:
        ``[B, T, C]`` in the dtype of the weights.
    """
    return F.embedding(ids, wte) + F.embedding(positions, wpe)
