"""Split the packed qkv projection and write its K and V into the preallocated cache.

Row b brings ``counts[b]`` new tokens; they go to positions ``starts[b] ..`` of cache slot
``slots[b]``. Tokens past ``counts[b]`` are padding and are not written. One pass over the
projection: reads ``2 * sum(counts) * H * D`` elements and writes as many.
"""

from torch import Tensor


def kv_append_reference(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Store K and V, return Q.

    Args:
        qkv: ``[B, T, 3 * H * D]``, the output of the qkv projection with its bias.
        k_cache, v_cache: ``[n_slots, H, max_len, D]`` of one layer, written in place.
        slots, starts, counts: ``[B]`` integers; ``starts + counts <= max_len`` (the cache checks).

    Returns:
        q as a view of ``qkv``: ``[B, T, H, D]``.
    """
    _, n_head, _, head_dim = k_cache.shape
    q, k, v = qkv.unflatten(2, (3, n_head, head_dim)).unbind(2)
    rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for row, (slot, start, count) in enumerate(rows):
        k_cache[slot, :, start : start + count] = k[row, :count].transpose(0, 1)
        v_cache[slot, :, start : start + count] = v[row, :count].transpose(0, 1)
    return q
