"""Attention of the newest tokens against the KV cache: one token a row in a decode step, more in a
chunk of prefill.

Query i of row b stands at position ``starts[b] + i`` and sees the cache of its slot up to and with
that position. Decode is bandwidth bound: each step reads ``2 * sum(lengths) * H * D`` elements of
the cache. Nothing past a row's own length is read, whatever it holds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Attend row by row, so that each row is computed as if it were alone.

    Args:
        q: ``[B, T, H, D]``; row b has ``counts[b]`` real queries, the rest is padding.
        k_cache, v_cache: ``[n_slots, H, max_len, D]`` of one layer, the new tokens included.
        slots, starts, counts: ``[B]`` integers, as in :func:`kv_append_reference`.
        scale: factor on the scores.

    Returns:
        ``[B, T, H * D]``; zero for padding.
    """
    n_rows, n_queries, n_head, head_dim = q.shape
    out = q.new_zeros(n_rows, n_head, n_queries, head_dim)
    rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for row, (slot, start, count) in enumerate(rows):
        length = start + count
        mask = None
        if count > 1:
            mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(start)
        out[row : row + 1, :, :count] = F.scaled_dot_product_attention(
            q[row : row + 1, :count].transpose(1, 2),
            k_cache[slot : slot + 1, :, :length],
            v_cache[slot : slot + 1, :, :length],
            attn_mask=mask,
            scale=scale,
        )
    return out.transpose(1, 2).flatten(2)
