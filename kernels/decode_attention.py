"""Attention of the newest tokens against the KV cache: 1 to 8 queries a row, as in a decode step.

Query i of row b stands at position ``starts[b] + i`` and sees the cache of its slot up to and with
that position: ``out = sum_j softmax_j(scale * q . k_j) * v_j``. Nothing past a row's own length is
read, whatever it holds.

Tiling (Flash-Decoding, https://pytorch.org/blog/flash-decoding/). A row has too few queries to fill
a GPU, so its keys are split: a program owns BLOCK_N keys of one row and head, and stores what its
keys give, normalised, with their log-sum-exp; a second kernel adds up the blocks of a row. The grid
is that of the cache's whole ``max_len``, so that a captured graph stays valid as rows grow; a
program beyond its row's length does nothing. The blocks of a row depend on its length alone: a row
gives the same bits whatever its neighbours and ``max_len``, as long as none of them brings more
than 8 queries.

Bandwidth bound: for rows of L tokens, H heads of D and elements of s bytes the cache gives
``2 L H D s`` bytes a row; the blocks' partial results, fp32, are stored and loaded once each: about
3 % of that a query, for a 16-bit cache and heads of 64. FLOPs: ``4 L H D`` a query. Exactly:
:func:`_work`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.attention import MAX_HEAD_DIM, launch_cached
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
from gptile.kernels.tiles import MIN_DOT, block_of, load_tile, product_options

MAX_QUERIES = 8
"""Longer chunks of tokens go to the kernel of attention.py, which reads the cache once a tile of
queries; both kernels of this file hold all the queries of a row."""
_BLOCK_N = 64
"""Keys of a program: one row of 12 heads and 1024 tokens makes 192 programs."""
_BLOCKS = 16
"""Blocks added at a time: a row of 1024 tokens in one step."""

CASES: dict[str, dict[str, int]] = {
    "gpt2-decode": {"rows": 1, "tokens": 1, "heads": 12, "head_dim": 64, "length": 1000},
    "gpt2-decode-batch": {"rows": 8, "tokens": 1, "heads": 12, "head_dim": 64, "length": 517},
    "gpt2-speculate": {"rows": 1, "tokens": 5, "heads": 12, "head_dim": 64, "length": 700},
    "gpt2-xl-decode": {"rows": 1, "tokens": 1, "heads": 25, "head_dim": 64, "length": 1024},
    "head_dim 8": {"rows": 2, "tokens": 8, "heads": 3, "head_dim": 8, "length": 64},
    "head_dim 40": {"rows": 2, "tokens": 2, "heads": 2, "head_dim": 40, "length": 65},
    "head_dim 80": {"rows": 2, "tokens": 1, "heads": 2, "head_dim": 80, "length": 129},
    "head_dim 128": {"rows": 1, "tokens": 3, "heads": 2, "head_dim": 128, "length": 63},
    "one token": {"rows": 2, "tokens": 1, "heads": 2, "head_dim": 16, "length": 1},
}
"""Shapes by name: what GPT-2 launches, and ragged ones; each row's length has its newest tokens
included, and the cache has room for 1024."""
_CASE_MAX_LEN = 1024


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
        slots, starts, counts: ``[B]`` integers, as in
            :func:`~gptile.kernels.kv_append.kv_append_reference`.
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
            k_cache[slot : slot + 1, :, :length].to(q.dtype),
            v_cache[slot : slot + 1, :, :length].to(q.dtype),
            attn_mask=mask,
            scale=scale,
        )
    return out.transpose(1, 2).flatten(2)


@triton.jit
def _block_kernel(
    q_ptr,  # queries, [B, T, H, D]
    k_ptr,  # key cache, [n_slots, H, max_len, D]
    v_ptr,  # value cache, of the same strides
    partial_ptr,  # attention over each block of keys, fp32 [B, H, n_blocks, T, D]
    lse_ptr,  # log-sum-exp of its scores, fp32 [B, H, n_blocks, T]
    slots_ptr,  # cache slot of each row, [B]
    starts_ptr,  # position of each row's first query, [B]
    counts_ptr,  # queries of each row that are not padding, [B]
    q_row_stride,  # elements between rows of q
    q_token_stride,  # elements between tokens of q
    q_head_stride,  # elements between heads of q
    slot_stride,  # elements between slots of the cache
    head_stride,  # elements between heads of the cache
    token_stride,  # elements between tokens of the cache
    max_len,  # positions of a slot
    n_blocks,  # of the cache's whole length
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    scale,  # factor on the scores
    BLOCK_M: tl.constexpr,  # >= T
    BLOCK_N: tl.constexpr,  # keys a program owns
    BLOCK_D: tl.constexpr,  # power of two >= D
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    row_head = (tl.program_id(0) // n_blocks).to(tl.int64)
    row = row_head // n_head
    head = row_head % n_head
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row).to(tl.int32)
    count = tl.load(counts_ptr + row).to(tl.int32)
    n_keys = tl.minimum(start + count, max_len)  # a wrong span must not reach another head
    block = tl.program_id(0) % n_blocks
    first = block * BLOCK_N
    if first < n_keys:
        tokens = tl.arange(0, BLOCK_M)
        keys = first + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        q_base = q_ptr + row * q_row_stride + head * q_head_stride
        base = slot * slot_stride + head * head_stride
        q = load_tile(q_base, q_token_stride, tokens, dims, count, head_dim, FP32)
        k = load_tile(k_ptr + base, token_stride, keys, dims, n_keys, head_dim, FP32).to(q.dtype)
        v = load_tile(v_ptr + base, token_stride, keys, dims, n_keys, head_dim, FP32).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(keys[None, :] <= start + tokens[:, None], scores, -float("inf"))
        maximum = tl.max(scores, axis=1)
        # An early query of the row may see no key of this block.
        finite = tl.where(maximum == -float("inf"), 0.0, maximum)
        weights = tl.exp2((scores - finite[:, None]) * LOG2_E)
        total = tl.sum(weights, axis=1)
        total = tl.where(total == 0.0, 1.0, total)
        out = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
        rows = (row_head * n_blocks + block) * n_tokens + tokens
        mask = (tokens[:, None] < n_tokens) & (dims[None, :] < head_dim)
        tl.store(partial_ptr + rows[:, None] * head_dim + dims[None, :], out, mask=mask)
        tl.store(lse_ptr + rows, maximum + tl.log(total), mask=tokens < n_tokens)


@triton.jit
def _combine_kernel(
    partial_ptr,  # fp32 [B, H, n_blocks, T, D]
    lse_ptr,  # fp32 [B, H, n_blocks, T]
    out_ptr,  # [B, T, H, D] contiguous
    starts_ptr,  # position of each row's first query, [B]
    counts_ptr,  # queries of each row that are not padding, [B]
    max_len,  # positions of a slot
    n_blocks,  # of the cache's whole length
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    BLOCK_N: tl.constexpr,  # keys of a block
    BLOCKS: tl.constexpr,  # blocks added at a time
    BLOCK_D: tl.constexpr,  # power of two >= D
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0) % n_tokens
    row_head = (tl.program_id(0) // n_tokens).to(tl.int64)
    row = row_head // n_head
    head = row_head % n_head
    count = tl.load(counts_ptr + row).to(tl.int32)
    n_keys = tl.minimum(tl.load(starts_ptr + row).to(tl.int32) + count, max_len)
    n_filled = (n_keys + BLOCK_N - 1) // BLOCK_N
    if token >= count:  # padding
        n_filled = 0
    dims = tl.arange(0, BLOCK_D)
    maximum = -float("inf")
    total = 0.0
    out = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(0, n_filled, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        rows = (row_head * n_blocks + blocks) * n_tokens + token
        lse = tl.load(lse_ptr + rows, mask=blocks < n_filled, other=-float("inf"))
        mask = (blocks[:, None] < n_filled) & (dims[None, :] < head_dim)
        partial = tl.load(
            partial_ptr + rows[:, None] * head_dim + dims[None, :], mask=mask, other=0.0
        )
        # Every query sees the first block, so the maximum is finite from the first step on.
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        weights = tl.exp2((lse - new_maximum) * LOG2_E)
        shrink = tl.exp2((maximum - new_maximum) * LOG2_E)
        total = total * shrink + tl.sum(weights, axis=0)
        out = out * shrink + tl.sum(weights[:, None] * partial, axis=0)
        maximum = new_maximum
    out = out / tl.where(total == 0.0, 1.0, total)
    offsets = ((row * n_tokens + token) * n_head + head) * head_dim + dims
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=dims < head_dim)


def launch_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """``[B, T, H, D]``."""
    check_inputs(q, k_cache, v_cache, indices=(slots, starts, counts))
    n_rows, n_tokens, n_head, head_dim = q.shape
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} exceeds the {MAX_HEAD_DIM} of this kernel")
    if k_cache.shape[1::2] != (n_head, head_dim) or k_cache.shape != v_cache.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k_cache, v_cache))
        raise ValueError(f"q and the caches do not match: {shapes}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("the caches must have equal strides, with features side by side")
    check_indices(n_rows, slots=slots, starts=starts, counts=counts)
    if n_tokens > MAX_QUERIES:
        return launch_cached(q, k_cache, v_cache, slots, starts, counts, scale)
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    max_len = k_cache.shape[2]
    n_blocks = triton.cdiv(max_len, _BLOCK_N)
    size = (n_rows, n_head, n_blocks, n_tokens)
    lse = torch.empty(size, dtype=torch.float32, device=q.device)
    partial = torch.empty(*size, head_dim, dtype=torch.float32, device=q.device)
    if q.numel():
        launch(
            _block_kernel,
            (n_blocks * n_rows * n_head,),
            q,
            k_cache,
            v_cache,
            partial,
            lse,
            slots.contiguous(),
            starts.contiguous(),
            counts.contiguous(),
            *q.stride()[:3],
            *k_cache.stride()[:3],
            max_len,
            n_blocks,
            n_tokens,
            n_head,
            head_dim,
            scale,
            BLOCK_M=MIN_DOT,
            BLOCK_N=_BLOCK_N,
            BLOCK_D=block_of(head_dim),
            **product_options(q.dtype),
            num_warps=4 if head_dim <= 64 else 8,  # 32 elements of k and of v a thread
        )
        launch(
            _combine_kernel,
            (n_tokens * n_rows * n_head,),
            partial,
            lse,
            out,
            starts.contiguous(),
            counts.contiguous(),
            max_len,
            n_blocks,
            n_tokens,
            n_head,
            head_dim,
            BLOCK_N=_BLOCK_N,
            BLOCKS=_BLOCKS,
            BLOCK_D=block_of(head_dim),
            num_warps=2,
        )
    return out


@torch.library.custom_op("gptile::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    return launch_forward(q, k_cache, v_cache, slots, starts, counts, scale)


@_decode_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """:func:`decode_attention_reference`, and for more than :data:`MAX_QUERIES` queries a row the
    kernel of attention.py. Not differentiable. No host synchronisation: the values of slots are not
    checked, and a span beyond its slot ends there."""
    return _decode_attention(q, k_cache, v_cache, slots, starts, counts, scale).flatten(2)


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`decode_attention_reference` for a case."""
    rows, tokens, heads, head_dim = (shape[n] for n in ("rows", "tokens", "heads", "head_dim"))
    caches = example(2, rows, heads, _CASE_MAX_LEN, head_dim, dtype=dtype, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    counts = torch.full_like(slots, tokens)
    q = example(rows, tokens, heads, head_dim, dtype=dtype, device=device)
    return {
        **{"q": q, "k_cache": caches[0], "v_cache": caches[1]},
        **{"slots": slots, "starts": shape["length"] - counts, "counts": counts, "scale": 0.125},
    }


def _launch_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    launch_forward(**inputs(shape, dtype, device))


def _work(shape: Shape, dtype: torch.dtype) -> Work:
    tokens, head_dim, length = shape["tokens"], shape["head_dim"], shape["length"]
    width = head_dim * dtype.itemsize
    n_blocks, filled = triton.cdiv(_CASE_MAX_LEN, _BLOCK_N), triton.cdiv(length, _BLOCK_N)
    partial = filled * tokens * 4 * (head_dim + 1)  # with its log-sum-exp
    spans = 3 * 4 * n_blocks + 2 * 4 * tokens  # slot, start and count; start and count
    loaded = 2 * length * width + filled * tokens * width + partial + spans
    stored = partial + tokens * width
    heads = shape["rows"] * shape["heads"]
    distinct = heads * (2 * length * width + tokens * width + partial + stored)
    distinct += shape["rows"] * 5 * 4
    flops = heads * 4 * tokens * length * head_dim
    return Work(heads * loaded, heads * stored, distinct, flops)


PASSES = {"forward": Pass(_launch_case, _work)}
