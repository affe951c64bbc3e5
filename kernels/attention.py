"""Causal self-attention over whole sequences, as in training and an uncached forward pass.

``out[b, i, h] = sum_{j <= i} softmax_j(scale * q[b, i, h] . k[b, j, h]) * v[b, j, h]``

q, k and v are strided views of the packed projection, never copied. Scores and softmax are fp32 for
16-bit inputs, which is what Hugging Face's ``reorder_and_upcast_attn`` asks for.

Tiling (FlashAttention-2, https://arxiv.org/abs/2307.08691). Forward, a program owns BLOCK_M queries
of one head and walks over the keys they see in blocks of BLOCK_N, with a running maximum and sum:
the scores never leave the chip. It saves the log-sum-exp of each query. Backward, one kernel owns
keys and walks over the queries that see them (dk, dv), another owns queries and walks over their
keys (dq); scores are computed again in both, so that nothing is added atomically and the same input
gives the same bits. Head dimensions are padded to a power of two with masked lanes.

FLOPs for B rows of T tokens, H heads of D: ``2 B H T^2 D`` forward (the causal half of
``4 B H T^2 D``), 3.5 times that backward: 2.5 for the gradients, 1 for the second recomputation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import check_inputs, interpreting, launch

MAX_HEAD_DIM = 128

CASES: dict[str, dict[str, int]] = {
    "gpt2-prefill": {"rows": 1, "tokens": 1024, "heads": 12, "head_dim": 64},
    "gpt2-train": {"rows": 8, "tokens": 1024, "heads": 12, "head_dim": 64},
    "gpt2-xl-prefill": {"rows": 1, "tokens": 1024, "heads": 25, "head_dim": 64},
    "demo-train": {"rows": 12, "tokens": 256, "heads": 4, "head_dim": 64},
    "head_dim 8": {"rows": 2, "tokens": 65, "heads": 3, "head_dim": 8},
    "head_dim 40": {"rows": 2, "tokens": 63, "heads": 2, "head_dim": 40},
    "head_dim 80": {"rows": 2, "tokens": 129, "heads": 2, "head_dim": 80},
    "head_dim 128": {"rows": 2, "tokens": 64, "heads": 2, "head_dim": 128},
    "one token": {"rows": 2, "tokens": 1, "heads": 2, "head_dim": 16},
    "few tokens": {"rows": 2, "tokens": 17, "heads": 2, "head_dim": 96},
}
"""Shapes by name: what GPT-2 launches, and ragged ones."""


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


@triton.jit
def _load_tile(
    base_ptr,  # of one row and head
    token_stride,  # elements between tokens
    tokens,  # token index of each tile row
    dims,  # feature index of each tile column
    n_tokens,  # tokens there are
    head_dim,  # features there are
    FP32: tl.constexpr,  # convert: the interpreter multiplies bf16 as integers
):
    mask = (tokens[:, None] < n_tokens) & (dims[None, :] < head_dim)
    tile = tl.load(base_ptr + tokens[:, None] * token_stride + dims[None, :], mask=mask, other=0.0)
    return tile.to(tl.float32) if FP32 else tile


@triton.jit
def _forward_kernel(
    q_ptr,  # queries, [B, T, H, D]
    k_ptr,  # keys, [B, T, H, D]
    v_ptr,  # values, [B, T, H, D]
    out_ptr,  # [B, T, H, D] contiguous
    lse_ptr,  # natural log-sum-exp of each query's scores, fp32 [B, H, T]
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
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = (tl.program_id(1) // n_head).to(tl.int64)
    head = (tl.program_id(1) % n_head).to(tl.int64)
    base = row * row_stride + head * head_stride
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q = _load_tile(q_ptr + base, token_stride, queries, dims, n_tokens, head_dim, FP32)
    maximum = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, n_tokens), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        v = _load_tile(v_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(keys[None, :] <= queries[:, None], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2((scores - new_maximum[:, None]) * LOG2_E)
        shrink = tl.exp2((maximum - new_maximum) * LOG2_E)
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    out = out / total[:, None]
    mask = (queries[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = ((row * n_tokens + queries[:, None]) * n_head + head) * head_dim + dims[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = maximum + tl.log(total)
    tl.store(lse_ptr + (row * n_head + head) * n_tokens + queries, lse, mask=queries < n_tokens)


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
    row = (tl.program_id(1) // n_head).to(tl.int64)
    head = (tl.program_id(1) % n_head).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
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
    lse_ptr,  # of one row and head
    delta_ptr,  # of one row and head
    queries,  # token index of each query
    keys,  # token index of each key
    n_tokens,  # T
    scale,  # factor on the scores
    PRECISION: tl.constexpr,  # of fp32 products
):
    """The attention weights again, and the gradient of the scores before their scaling."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_ptr + queries, mask=queries < n_tokens, other=0.0)
    delta = tl.load(delta_ptr + queries, mask=queries < n_tokens, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (keys[None, :] <= queries[:, None]) & (queries[:, None] < n_tokens)
    # Masked before the exponential: an unseen score may exceed the log-sum-exp by any amount.
    scores = tl.where(seen, scores - lse[:, None], -float("inf"))
    weights = tl.exp2(scores * LOG2_E)
    dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    return weights, weights * (dweights - delta[:, None]) * scale


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
    row = (tl.program_id(1) // n_head).to(tl.int64)
    head = (tl.program_id(1) % n_head).to(tl.int64)
    base = row * row_stride + head * head_stride
    out_base = (row * n_tokens * n_head + head) * head_dim
    statistics = (row * n_head + head) * n_tokens
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k = _load_tile(k_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
    v = _load_tile(v_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    first = tl.program_id(0) * BLOCK_N // BLOCK_M * BLOCK_M  # earlier queries see none of the keys
    for start in range(first, n_tokens, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q = _load_tile(q_ptr + base, token_stride, queries, dims, n_tokens, head_dim, FP32)
        stride = n_head * head_dim
        dout = _load_tile(dout_ptr + out_base, stride, queries, dims, n_tokens, head_dim, FP32)
        weights, dscores = _score_gradient(
            q,
            k,
            v,
            dout,
            lse_ptr + statistics,
            delta_ptr + statistics,
            queries,
            keys,
            n_tokens,
            scale,
            PRECISION,
        )
        dv += tl.dot(tl.trans(weights.to(dout.dtype)), dout, input_precision=PRECISION)
        dk += tl.dot(tl.trans(dscores.to(q.dtype)), q, input_precision=PRECISION)
    mask = (keys[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = out_base + keys[:, None] * n_head * head_dim + dims[None, :]
    tl.store(dk_ptr + offsets, dk.to(dk_ptr.dtype.element_ty), mask=mask)
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
    row = (tl.program_id(1) // n_head).to(tl.int64)
    head = (tl.program_id(1) % n_head).to(tl.int64)
    base = row * row_stride + head * head_stride
    out_base = (row * n_tokens * n_head + head) * head_dim
    statistics = (row * n_head + head) * n_tokens
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q = _load_tile(q_ptr + base, token_stride, queries, dims, n_tokens, head_dim, FP32)
    stride = n_head * head_dim
    dout = _load_tile(dout_ptr + out_base, stride, queries, dims, n_tokens, head_dim, FP32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, n_tokens), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        v = _load_tile(v_ptr + base, token_stride, keys, dims, n_tokens, head_dim, FP32)
        _, dscores = _score_gradient(
            q,
            k,
            v,
            dout,
            lse_ptr + statistics,
            delta_ptr + statistics,
            queries,
            keys,
            n_tokens,
            scale,
            PRECISION,
        )
        dq += tl.dot(dscores.to(k.dtype), k, input_precision=PRECISION)
    mask = (queries[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = out_base + queries[:, None] * n_head * head_dim + dims[None, :]
    tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)


# Queries, keys and warps of a program: the largest tiles that spill nothing on any target. fp32
# products run on the ordinary cores, from registers, so those tiles are small.
_TILES = {
    # (backward, fp32, head_dim > 64)
    (False, False, False): (128, 64, 8),
    (False, False, True): (128, 64, 8),
    (False, True, False): (64, 32, 8),
    (False, True, True): (32, 16, 8),
    (True, False, False): (64, 32, 4),
    (True, False, True): (32, 32, 4),
    (True, True, False): (32, 16, 4),
    (True, True, True): (16, 16, 8),
}


def _shape(head_dim: int, dtype: torch.dtype, *, backward: bool) -> dict[str, Any]:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} exceeds the {MAX_HEAD_DIM} of this kernel")
    block_m, block_n, warps = _TILES[backward, dtype == torch.float32, head_dim > 64]
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # the least that tl.dot takes
        "PRECISION": "ieee" if exact else "tf32",
        "FP32": interpreting() and dtype == torch.bfloat16,
        "num_warps": warps,
        "num_stages": 2,  # of loads: within the 99 KB of shared memory of sm_86
    }


def _same_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As they are where they are views of one packed projection, else contiguous."""
    if q.stride() == k.stride() == v.stride() and q.stride(3) == 1:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out [B, T, H, D], lse [B, H, T])``."""
    check_inputs(q, k, v)
    q, k, v = _same_layout(q, k, v)
    n_rows, n_tokens, n_head, head_dim = q.shape
    shape = _shape(head_dim, q.dtype, backward=False)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(n_rows, n_head, n_tokens, dtype=torch.float32, device=q.device)
    if q.numel():
        launch(
            _forward_kernel,
            (triton.cdiv(n_tokens, shape["BLOCK_M"]), n_rows * n_head),
            q,
            k,
            v,
            out,
            lse,
            *q.stride()[:3],
            n_tokens,
            n_head,
            head_dim,
            scale,
            **shape,
        )
    return out, lse


def launch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, each ``[B, T, H, D]`` contiguous."""
    q, k, v = _same_layout(q, k, v)
    dout = dout.contiguous()
    n_rows, n_tokens, n_head, head_dim = q.shape
    shape = _shape(head_dim, q.dtype, backward=True)
    dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    delta = torch.empty_like(lse)
    if not q.numel():
        return dq, dk, dv
    sizes = (n_tokens, n_head, head_dim)
    block_m, block_n, block_d = shape["BLOCK_M"], shape["BLOCK_N"], shape["BLOCK_D"]
    launch(
        _delta_kernel,
        (triton.cdiv(n_tokens, block_m), n_rows * n_head),
        out,
        dout,
        delta,
        *sizes,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
    )
    for kernel, block, gradients in (
        (_backward_kv_kernel, block_n, (dk, dv)),
        (_backward_q_kernel, block_m, (dq,)),
    ):
        launch(
            kernel,
            (triton.cdiv(n_tokens, block), n_rows * n_head),
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
            **shape,
        )
    return dq, dk, dv


@torch.library.custom_op("gptile::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return launch_forward(q, k, v, scale)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n_rows, n_tokens, n_head, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(n_rows, n_head, n_tokens, dtype=torch.float32)


@torch.library.custom_op("gptile::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_backward(dout, q, k, v, out, lse, scale)


@_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_attention_backward(dout, *ctx.saved_tensors, ctx.scale), None)


_attention.register_autograd(_differentiate, setup_context=_save)


def attention_triton(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """:func:`attention_reference` without ever holding the scores. Differentiable once.

    With dropout it is PyTorch's: the kernel has none.
    """
    if dropout_p > 0:
        return attention_reference(q, k, v, scale, dropout_p)
    return _attention(q, k, v, scale)[0].flatten(2)
