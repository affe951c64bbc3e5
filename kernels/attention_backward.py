"""The gradients of causal self-attention (attention.py): dq, dk and dv from dout.

With p the attention weights, computed again from q, k and the saved log-sum-exp:
``dv = p^T dout``, ``ds = p * (dout v^T - delta)``, ``dq = scale * ds k``, ``dk = scale * ds^T q``,
where ``delta[i] = sum_d out[i, d] * dout[i, d]`` (FlashAttention-2,
https://arxiv.org/abs/2307.08691).

Tiling. One kernel takes the deltas. One owns BLOCK_N keys and walks over the queries that see them
(dk, dv); another owns BLOCK_M queries and walks over their keys (dq). The scores are computed in
both, so that nothing is added atomically and the same input gives the same bits.

For B rows of T tokens, H heads of D and elements of s bytes: ``7 B H T^2 D`` FLOPs, 3.5 times the
forward pass: 5 products for the gradients and 2 for the second recomputation. Each walk loads about
``B H T^2 D s / BLOCK`` bytes, from L2 but for the first time; the gradients stored are
``3 B H T D s``. Exactly: :func:`backward_work`.
"""

from typing import Any

import torch
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import Shape, Work, launch
from gptile.kernels.tiles import block_of, load_tile, product_options


@triton.jit
def _delta_kernel(
    out_ptr,  # [B, T, H, D] contiguous
    dout_ptr,  # its gradient, [B, T, H, D] contiguous
    delta_ptr,  # sum over D of their product, fp32 [B, H, T]
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    BLOCK_M: tl.constexpr,  # tokens a program owns
    BLOCK_D: tl.constexpr,  # power of two >= D
):
    n_tiles = tl.cdiv(n_tokens, BLOCK_M)
    row = (tl.program_id(0) // (n_tiles * n_head)).to(tl.int64)
    head = (tl.program_id(0) // n_tiles % n_head).to(tl.int64)
    tokens = tl.program_id(0) % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (tokens[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = ((row * n_tokens + tokens[:, None]) * n_head + head) * head_dim + dims[None, :]
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, axis=1)
    tl.store(delta_ptr + (row * n_head + head) * n_tokens + tokens, delta, mask=tokens < n_tokens)


@triton.jit
def _score_gradient(
    q,  # [BLOCK_M, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_D]
    dout,  # [BLOCK_M, BLOCK_D]
    lse,  # log-sum-exp of each query, [BLOCK_M]
    delta,  # [BLOCK_M]
    queries,  # token index of each query
    keys,  # token index of each key
    n_tokens,  # T
    scale,  # factor on the scores
    PRECISION: tl.constexpr,  # of fp32 products
):
    """The attention weights again, and the gradient of the scaled scores: the scale is left for the
    end, or in fp16 small gradients would lose digits to it."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (keys[None, :] <= queries[:, None]) & (queries[:, None] < n_tokens)
    # Masked before the exponential: an unseen score may exceed the log-sum-exp by any amount.
    scores = tl.where(seen, scores - lse[:, None], -float("inf"))
    weights = tl.exp2(scores * LOG2_E)
    dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    return weights, weights * (dweights - delta[:, None])


@triton.jit
def _backward_kv_kernel(
    q_ptr,  # queries, [B, T, H, D]
    k_ptr,  # keys, [B, T, H, D]
    v_ptr,  # values, [B, T, H, D]
    dout_ptr,  # gradient of the output, [B, T, H, D] contiguous
    lse_ptr,  # of the forward pass, [B, H, T]
    delta_ptr,  # of the delta kernel, [B, H, T]
    dk_ptr,  # [B, T, H, D] contiguous
    dv_ptr,  # [B, T, H, D] contiguous
    row_stride,  # elements between rows of q, k and v
    token_stride,  # elements between tokens of q, k and v
    head_stride,  # elements between heads of q, k and v
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    scale,  # factor on the scores
    BLOCK_M: tl.constexpr,  # queries a step
    BLOCK_N: tl.constexpr,  # keys a program owns
    BLOCK_D: tl.constexpr,  # power of two >= D
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    n_tiles = tl.cdiv(n_tokens, BLOCK_N)
    row = (tl.program_id(0) // (n_tiles * n_head)).to(tl.int64)
    head = (tl.program_id(0) // n_tiles % n_head).to(tl.int64)
    first_key = tl.program_id(0) % n_tiles * BLOCK_N
    base = row * row_stride + head * head_stride
    out_base = (row * n_tokens * n_head + head) * head_dim
    statistics = (row * n_head + head) * n_tokens
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
    v = load_tile(v_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    first = first_key // BLOCK_M * BLOCK_M  # earlier queries see none of the keys
    for start in range(first, n_tokens, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr + base, token_stride, queries, dims, n_tokens, head_dim, FP32)
        stride = n_head * head_dim
        dout = load_tile(dout_ptr + out_base, stride, queries, dims, n_tokens, head_dim, FP32)
        lse = tl.load(lse_ptr + statistics + queries, mask=queries < n_tokens, other=0.0)
        delta = tl.load(delta_ptr + statistics + queries, mask=queries < n_tokens, other=0.0)
        weights, dscores = _score_gradient(
            q, k, v, dout, lse, delta, queries, keys, n_tokens, scale, PRECISION
        )
        dv += tl.dot(tl.trans(weights.to(dout.dtype)), dout, input_precision=PRECISION)
        dk += tl.dot(tl.trans(dscores.to(q.dtype)), q, input_precision=PRECISION)
    mask = (keys[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = out_base + keys[:, None] * n_head * head_dim + dims[None, :]
    tl.store(dk_ptr + offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_q_kernel(
    q_ptr,  # queries, [B, T, H, D]
    k_ptr,  # keys, [B, T, H, D]
    v_ptr,  # values, [B, T, H, D]
    dout_ptr,  # gradient of the output, [B, T, H, D] contiguous
    lse_ptr,  # of the forward pass, [B, H, T]
    delta_ptr,  # of the delta kernel, [B, H, T]
    dq_ptr,  # [B, T, H, D] contiguous
    row_stride,  # elements between rows of q, k and v
    token_stride,  # elements between tokens of q, k and v
    head_stride,  # elements between heads of q, k and v
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    scale,  # factor on the scores
    BLOCK_M: tl.constexpr,  # queries a program owns
    BLOCK_N: tl.constexpr,  # keys a step
    BLOCK_D: tl.constexpr,  # power of two >= D
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    n_tiles = tl.cdiv(n_tokens, BLOCK_M)
    row = (tl.program_id(0) // (n_tiles * n_head)).to(tl.int64)
    head = (tl.program_id(0) // n_tiles % n_head).to(tl.int64)
    first_query = tl.program_id(0) % n_tiles * BLOCK_M
    base = row * row_stride + head * head_stride
    out_base = (row * n_tokens * n_head + head) * head_dim
    statistics = (row * n_head + head) * n_tokens
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base, token_stride, queries, dims, n_tokens, head_dim, FP32)
    stride = n_head * head_dim
    dout = load_tile(dout_ptr + out_base, stride, queries, dims, n_tokens, head_dim, FP32)
    lse = tl.load(lse_ptr + statistics + queries, mask=queries < n_tokens, other=0.0)
    delta = tl.load(delta_ptr + statistics + queries, mask=queries < n_tokens, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, tl.minimum(first_query + BLOCK_M, n_tokens), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        v = load_tile(v_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        _, dscores = _score_gradient(
            q, k, v, dout, lse, delta, queries, keys, n_tokens, scale, PRECISION
        )
        dq += tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
    mask = (queries[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = out_base + queries[:, None] * n_head * head_dim + dims[None, :]
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


def _tiles(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """The largest tiles that spill nothing on any target: accumulators and four operands share the
    registers, and fp32 products run from there too, with one stage of loads."""
    block_m, block_n, warps, stages = {
        # (fp32, head_dim > 64)
        (False, False): (64, 32, 4, 2),
        (False, True): (32, 32, 4, 2),
        (True, False): (32, 16, 4, 1),
        (True, True): (16, 16, 8, 1),
    }[dtype == torch.float32, head_dim > 64]
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_of(head_dim)}
    return {**sizes, **product_options(dtype), "num_warps": warps, "num_stages": stages}


def launch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, each ``[B, T, H, D]`` contiguous.

    Args:
        dout, out: ``[B, T, H, D]`` contiguous.
        q, k, v: ``[B, T, H, D]`` of equal strides.
        lse: ``[B, H, T]``, of the forward pass.
    """
    n_rows, n_tokens, n_head, head_dim = q.shape
    tiles = _tiles(head_dim, q.dtype)
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    delta = torch.empty_like(lse)
    if not q.numel():
        return dq, dk, dv
    sizes = (n_tokens, n_head, head_dim)
    launch(
        _delta_kernel,
        (triton.cdiv(n_tokens, tiles["BLOCK_M"]) * n_rows * n_head,),
        out,
        dout,
        delta,
        *sizes,
        BLOCK_M=tiles["BLOCK_M"],
        BLOCK_D=tiles["BLOCK_D"],
    )
    for kernel, block, gradients in (
        (_backward_kv_kernel, tiles["BLOCK_N"], (dk, dv)),
        (_backward_q_kernel, tiles["BLOCK_M"], (dq,)),
    ):
        launch(
            kernel,
            (triton.cdiv(n_tokens, block) * n_rows * n_head,),
            q,
            k,
            v,
            dout,
            lse,
            delta,
            *gradients,
            *q.stride()[:3],
            *sizes,
            scale,
            **tiles,
        )
    return dq, dk, dv


def backward_work(shape: Shape, dtype: torch.dtype) -> Work:
    """What the three kernels do, for a case of attention.py."""
    tokens, width = shape["tokens"], shape["head_dim"] * dtype.itemsize
    heads = shape["rows"] * shape["heads"]
    tiles = _tiles(shape["head_dim"], dtype)
    block_m, block_n = tiles["BLOCK_M"], tiles["BLOCK_N"]
    # Queries that the owners of keys walk over, and keys that the owners of queries do.
    queries = sum(tokens - first // block_m * block_m for first in range(0, tokens, block_n))
    ends = [min(first + block_m, tokens) for first in range(0, tokens, block_m)]
    keys = sum(min(triton.cdiv(end, block_n) * block_n, tokens) for end in ends)
    statistics = 2 * 4  # bytes of a query's log-sum-exp and delta
    loaded = 2 * tokens * width  # out and dout
    loaded += 2 * tokens * width + queries * (2 * width + statistics)
    loaded += tokens * (2 * width + statistics) + 2 * keys * width
    stored = 4 * tokens + 3 * tokens * width
    distinct = tokens * (2 * width + 2 * (4 * width + statistics)) + stored
    pairs = tokens * (tokens + 1) // 2
    flops = 7 * 2 * pairs * shape["head_dim"] + 2 * tokens * shape["head_dim"]
    return Work(heads * loaded, heads * stored, heads * distinct, heads * flops)
