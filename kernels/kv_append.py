"""Add the bias to the packed qkv projection, split it, and write K and V into the cache.

``q, k, v = split(qkv + bias)``: q is returned; k and v of the new tokens go where attention finds
those of the earlier ones (incremental inference, Shazeer 2019, https://arxiv.org/abs/1911.02150).
The sum is taken in fp32 and rounded once: to the dtype of the projection for q, to that of the
cache for k and v.

Tiling. A program owns COLUMNS columns of one token, in all three parts: three independent loads,
three stores. The projection is read once, its bias once a token (from L2 after the first). Nothing
is synchronised with the host: slots, starts and counts stay on the device.

Bytes, for R rows of T tokens without padding, width C = H * D, elements of s bytes, cache elements
of c bytes, int32 indices: loads ``6 R T C s`` (projection and bias) and 12 a program, stores
``R T C (s + 2 c)``. 3 FLOPs for each element of q: memory bound.
"""

from typing import Any

import torch
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import (
    Pass,
    Shape,
    Work,
    check_indices,
    check_inputs,
    example,
    launch,
)

# 8 elements a thread of one warp: 16-byte loads of 16-bit values, and several programs for the one
# token of a decode step. Divides the width of every GPT-2 but the xl.
_COLUMNS = 256

CASES: dict[str, dict[str, int]] = {
    "gpt2-decode": {"rows": 1, "tokens": 1, "heads": 12, "head_dim": 64, "max_len": 1024},
    "gpt2-decode-batch": {"rows": 8, "tokens": 1, "heads": 12, "head_dim": 64, "max_len": 1024},
    "gpt2-prefill": {"rows": 1, "tokens": 512, "heads": 12, "head_dim": 64, "max_len": 1024},
    "gpt2-xl-decode": {"rows": 1, "tokens": 1, "heads": 25, "head_dim": 64, "max_len": 1024},
    "head_dim 40": {"rows": 2, "tokens": 5, "heads": 7, "head_dim": 40, "max_len": 9},
    "head_dim 1": {"rows": 3, "tokens": 2, "heads": 3, "head_dim": 1, "max_len": 2},
}
"""Shapes by name: what GPT-2 launches, and ragged ones."""


def kv_append_reference(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Add the bias, store K and V, return Q.

    Args:
        qkv: ``[B, T, 3 * H * D]``, the output of the qkv projection without its bias.
        bias: ``[3 * H * D]``.
        k_cache, v_cache: ``[n_slots, H, max_len, D]`` of one layer, written in place.
        slots, starts, counts: ``[B]`` int32 or int64. Tokens 0 to ``counts[b] - 1`` of row b go to
            positions ``starts[b]`` .. of slot ``slots[b]``; the rest of the row is padding and is
            not stored. The cache has checked them: slots are distinct, and
            ``starts + counts <= max_len``.

    Returns:
        q: ``[B, T, H, D]`` in the dtype of ``qkv``, a new contiguous tensor. Padding included.
    """
    _, n_head, _, head_dim = k_cache.shape
    q, k, v = (qkv.float() + bias.float()).unflatten(2, (3, n_head, head_dim)).unbind(2)
    columns = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for row, (slot, start, count) in enumerate(columns):
        k_cache[slot, :, start : start + count] = k[row, :count].transpose(0, 1)
        v_cache[slot, :, start : start + count] = v[row, :count].transpose(0, 1)
    return q.to(qkv.dtype).contiguous()


@triton.jit
def _add_bias(
    qkv_ptr,  # a token's q, k or v, [n_cols]
    bias_ptr,  # of that part, [n_cols]
    cols,  # columns to load
    mask,  # which of them there are
):
    qkv = tl.load(qkv_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    return qkv + tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _append_kernel(
    qkv_ptr,  # projection without its bias, [B, T, 3 * n_cols]
    bias_ptr,  # [3 * n_cols]
    q_ptr,  # output, [B, T, n_cols] contiguous
    k_cache_ptr,  # [n_slots, H, max_len, D]
    v_cache_ptr,  # [n_slots, H, max_len, D]
    slots_ptr,  # slot of each row, [B]
    starts_ptr,  # position of each row's first token, [B]
    counts_ptr,  # tokens of each row that are not padding, [B]
    qkv_row_stride,  # elements between rows of qkv
    qkv_token_stride,  # elements between tokens of qkv
    slot_stride,  # elements between slots of both caches
    head_stride,  # elements between heads of both caches
    position_stride,  # elements between positions of both caches
    n_tokens,  # T
    n_cols,  # H * D
    head_dim,  # D
    max_len,  # positions of a slot
    COLUMNS: tl.constexpr,  # columns a program owns
):
    index = tl.program_id(0).to(tl.int64)
    row, token = index // n_tokens, index % n_tokens
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = cols < n_cols
    qkv_ptr += row * qkv_row_stride + token * qkv_token_stride
    q = _add_bias(qkv_ptr, bias_ptr, cols, mask)
    k = _add_bias(qkv_ptr + n_cols, bias_ptr + n_cols, cols, mask)
    v = _add_bias(qkv_ptr + 2 * n_cols, bias_ptr + 2 * n_cols, cols, mask)
    tl.store(q_ptr + index * n_cols + cols, q.to(q_ptr.dtype.element_ty), mask=mask)

    position = tl.load(starts_ptr + row).to(tl.int64) + token
    # The cache has checked the starts; a wrong one must still not reach another head's memory.
    inside = (position >= 0) & (position < max_len)
    mask = mask & inside & (token < tl.load(counts_ptr + row))
    slot = tl.load(slots_ptr + row).to(tl.int64)
    head, dim = (cols // head_dim).to(tl.int64), cols % head_dim
    offsets = slot * slot_stride + head * head_stride + position * position_stride + dim
    tl.store(k_cache_ptr + offsets, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + offsets, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def launch_append(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """:func:`kv_append_reference` in one kernel.

    Raises:
        ValueError: for shapes that do not fit, or caches of different or unsuitable strides.
        TypeError: for indices that are not int32 or int64.
    """
    check_inputs(qkv, bias, k_cache, v_cache, indices=(slots, starts, counts))
    _, n_head, max_len, head_dim = k_cache.shape
    n_rows, n_tokens, width = qkv.shape
    n_cols = n_head * head_dim
    if width != 3 * n_cols or bias.shape != (width,):
        raise ValueError(
            f"{n_head} heads of {head_dim} need a projection and a bias of {3 * n_cols} columns, "
            f"got {width} and {list(bias.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("the two caches must have the same shape and strides")
    if k_cache.stride(3) != 1:  # written in place, so no copy can stand in
        raise ValueError("the caches must have unit stride along head_dim")
    check_indices(n_rows, slots=slots, starts=starts, counts=counts)
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    q = torch.empty(n_rows, n_tokens, n_head, head_dim, dtype=qkv.dtype, device=qkv.device)
    if q.numel():
        launch(
            _append_kernel,
            (n_rows * n_tokens, triton.cdiv(n_cols, _COLUMNS)),
            qkv,
            bias.contiguous(),
            q,
            k_cache,
            v_cache,
            slots.contiguous(),
            starts.contiguous(),
            counts.contiguous(),
            qkv.stride(0),
            qkv.stride(1),
            *k_cache.stride()[:3],
            n_tokens,
            n_cols,
            head_dim,
            max_len,
            COLUMNS=_COLUMNS,
            num_warps=1,
        )
    return q


@torch.library.custom_op("gptile::kv_append", mutates_args=("k_cache", "v_cache"))
def _kv_append(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    return launch_append(qkv, bias, k_cache, v_cache, slots, starts, counts)


@_kv_append.register_fake
def _(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], k_cache.shape[1], k_cache.shape[3])


def kv_append_triton(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """:func:`kv_append_reference` in one kernel. Not differentiable: a cache is for inference.

    Slots are not checked on the device; tokens that a wrong start would put outside their slot are
    dropped.
    """
    return _kv_append(qkv, bias, k_cache, v_cache, slots, starts, counts)


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`kv_append_reference` for a case."""
    rows, tokens, heads, head_dim, max_len = shape.values()
    qkv = example(rows, tokens, 3 * heads * head_dim, dtype=dtype, device=device)
    bias = example(3 * heads * head_dim, dtype=dtype, device=device)
    cache = example(2, rows, heads, max_len, head_dim, dtype=dtype, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    starts, counts = torch.zeros_like(slots), torch.full_like(slots, tokens)
    return {
        **{"qkv": qkv, "bias": bias, "k_cache": cache[0], "v_cache": cache[1]},
        **{"slots": slots, "starts": starts, "counts": counts},
    }


def _launch_forward(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    launch_append(**inputs(shape, dtype, device))


def _forward_work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, tokens, heads, head_dim, _ = shape.values()
    elements = rows * tokens * heads * head_dim
    programs = rows * tokens * -(-heads * head_dim // _COLUMNS)
    loaded = 6 * elements * dtype.itemsize + programs * 3 * 4
    stored = 3 * elements * dtype.itemsize
    distinct = 3 * (elements + heads * head_dim) * dtype.itemsize + rows * 3 * 4 + stored
    return Work(loaded, stored, distinct, 3 * elements)


PASSES = {"forward": Pass(_launch_forward, _forward_work)}
