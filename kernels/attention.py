"""Causal self-attention over many queries: whole sequences in training, a chunk of the prompt
against the KV cache in prefill.

``out[b, i, h] = sum_{j <= i} softmax_j(scale * q[b, i, h] . k[b, j, h]) * v[b, j, h]``

In training q, k and v are strided views of the packed projection, never copied. Against the cache,
query i of row b stands at position ``starts[b] + i``, the first ``counts[b]`` queries are not
padding, and keys and values lie in slot ``slots[b]``. Scores and softmax are fp32 for 16-bit
inputs, which is what Hugging Face's ``reorder_and_upcast_attn`` asks for.

Tiling (FlashAttention-2, https://arxiv.org/abs/2307.08691). A program owns BLOCK_M queries of one
head and walks over the keys they see in blocks of BLOCK_N, with a running maximum and sum: the
scores never leave the chip. It saves the log-sum-exp of each query for the backward pass, which is
in attention_backward.py. Head dimensions are padded to a power of two with masked lanes.

For B rows of T tokens, H heads of D and elements of s bytes: ``2 B H T^2 D`` FLOPs (the causal half
of ``4 B H T^2 D``). A program loads its queries, and keys and values up to its last query, to the
end of a block: about ``B H D s (T + T^2 / BLOCK_M)`` bytes in all, of which all but
``3 B H T D s`` are re-reads from L2; stores ``B H T (D s + 4)``. Exactly: :func:`_forward_work`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.attention_backward import backward_work, launch_backward
from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import (
    Pass,
    Shape,
    Work,
    check_inputs,
    check_operands,
    example,
    launch,
)
from gptile.kernels.tiles import block_of, load_tile, product_options

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
def _forward_kernel(
    q_ptr,  # queries, [B, T, H, D]
    k_ptr,  # keys, [B, T, H, D], or the cache, [n_slots, H, max_len, D]
    v_ptr,  # values, like the keys
    out_ptr,  # [B, T, H, D] contiguous
    lse_ptr,  # natural log-sum-exp of each query's scores, fp32 [B, H, T]; unused if CACHED
    slots_ptr,  # cache slot of each row, [B]; unused unless CACHED, as the next two
    starts_ptr,  # position of each row's first query, [B]
    counts_ptr,  # queries of each row that are not padding, [B]
    q_row_stride,  # elements between rows of q
    q_token_stride,  # elements between tokens of q
    q_head_stride,  # elements between heads of q
    k_row_stride,  # elements between rows, or slots, of k and v
    k_token_stride,  # elements between tokens of k and v
    k_head_stride,  # elements between heads of k and v
    max_len,  # tokens there are in a row, or a slot, of k and v
    n_tokens,  # T
    n_head,  # H
    head_dim,  # D
    scale,  # factor on the scores
    CACHED: tl.constexpr,  # attend against the cache
    BLOCK_M: tl.constexpr,  # queries a program owns
    BLOCK_N: tl.constexpr,  # keys a step
    BLOCK_D: tl.constexpr,  # power of two >= D
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    n_tiles = tl.cdiv(n_tokens, BLOCK_M)
    row = (tl.program_id(0) // (n_tiles * n_head)).to(tl.int64)
    head = (tl.program_id(0) // n_tiles % n_head).to(tl.int64)
    if CACHED:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        start = tl.load(starts_ptr + row).to(tl.int32)
        count = tl.load(counts_ptr + row).to(tl.int32)
    else:
        slot = row
        start = 0
        count = n_tokens
    n_keys = tl.minimum(start + count, max_len)  # a wrong span must not reach another head
    first = tl.program_id(0) % n_tiles * BLOCK_M
    tokens = first + tl.arange(0, BLOCK_M)
    positions = start + tokens
    dims = tl.arange(0, BLOCK_D)
    q_base = q_ptr + row * q_row_stride + head * q_head_stride
    k_base = slot * k_row_stride + head * k_head_stride
    q = load_tile(q_base, q_token_stride, tokens, dims, count, head_dim, FP32)
    maximum = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    last = tl.minimum(start + first + BLOCK_M, n_keys)
    if first >= count:  # padding only
        last = 0
    for block in range(0, last, BLOCK_N):
        keys = block + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr + k_base, k_token_stride, keys, dims, n_keys, head_dim, FP32)
        v = load_tile(v_ptr + k_base, k_token_stride, keys, dims, n_keys, head_dim, FP32)
        k = k.to(q.dtype)  # the cache may be in another precision
        v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        # The first block holds a key that every query sees, so the maximum is finite from then on.
        scores = tl.where(keys[None, :] <= positions[:, None], scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2((scores - new_maximum[:, None]) * LOG2_E)
        shrink = tl.exp2((maximum - new_maximum) * LOG2_E)
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    total = tl.where(total == 0.0, 1.0, total)  # a tile of padding walked over nothing
    out = tl.where(tokens[:, None] < count, out / total[:, None], 0.0)
    mask = (tokens[:, None] < n_tokens) & (dims[None, :] < head_dim)
    offsets = ((row * n_tokens + tokens[:, None]) * n_head + head) * head_dim + dims[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    if not CACHED:
        lse = maximum + tl.log(total)
        tl.store(lse_ptr + (row * n_head + head) * n_tokens + tokens, lse, mask=tokens < n_tokens)


def _tiles(head_dim: int, dtype: torch.dtype, *, cached: bool) -> dict[str, Any]:
    """Tiles that spill nothing on any target. Two stages of loads fit the 99 KB of shared memory of
    sm_86; fp32 products run on the ordinary cores, from registers, which leaves room for smaller
    tiles and one stage; so do the cache's strides and the row's span."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} exceeds the {MAX_HEAD_DIM} of this kernel")
    block_m, block_n, warps, stages = {
        # (fp32, head_dim > 64, cached)
        (False, False, False): (128, 64, 8, 2),
        (False, False, True): (128, 32, 8, 2),
        (False, True, False): (128, 64, 8, 2),
        (False, True, True): (128, 64, 8, 2),
        (True, False, False): (32, 32, 4, 1),
        (True, False, True): (64, 16, 8, 1),
        (True, True, False): (32, 16, 8, 1),
        (True, True, True): (32, 16, 8, 1),
    }[dtype == torch.float32, head_dim > 64, cached]
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_of(head_dim)}
    return {**sizes, **product_options(dtype), "num_warps": warps, "num_stages": stages}


def _same_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As they are where they are views of one packed projection, else contiguous. Offsets within a
    row are int32 in the kernels."""
    if q.stride() == k.stride() == v.stride() and q.stride(3) == 1 and _spans_int32(q):
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def _spans_int32(x: Tensor) -> bool:
    return x.shape[1] * x.stride(1) < 2**31


def launch_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out [B, T, H, D], lse [B, H, T])``."""
    check_inputs(q)
    check_operands(q, k=(k, q.shape), v=(v, q.shape))
    q, k, v = _same_layout(q, k, v)
    n_rows, n_tokens, n_head, head_dim = q.shape
    tiles = _tiles(head_dim, q.dtype, cached=False)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(n_rows, n_head, n_tokens, dtype=torch.float32, device=q.device)
    if q.numel():
        launch(
            _forward_kernel,
            (triton.cdiv(n_tokens, tiles["BLOCK_M"]) * n_rows * n_head,),
            q,
            k,
            v,
            out,
            lse,
            *(lse, lse, lse),  # unused
            *q.stride()[:3],
            *k.stride()[:3],
            n_tokens,
            n_tokens,
            n_head,
            head_dim,
            scale,
            CACHED=False,
            **tiles,
        )
    return out, lse


def launch_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """``[B, T, H, D]``; the arguments are those of
    :func:`~gptile.kernels.decode_attention.decode_attention_reference`."""
    q = q if q.stride(3) == 1 and _spans_int32(q) else q.contiguous()
    n_rows, n_tokens, n_head, head_dim = q.shape
    widest = max(q.dtype, k_cache.dtype, key=lambda dtype: dtype.itemsize)
    tiles = {**_tiles(head_dim, widest, cached=True), **product_options(q.dtype)}
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    slot_stride, head_stride, token_stride, _ = k_cache.stride()
    if q.numel():
        launch(
            _forward_kernel,
            (triton.cdiv(n_tokens, tiles["BLOCK_M"]) * n_rows * n_head,),
            q,
            k_cache,
            v_cache,
            out,
            out,  # unused
            slots.contiguous(),
            starts.contiguous(),
            counts.contiguous(),
            *q.stride()[:3],
            slot_stride,
            token_stride,
            head_stride,
            k_cache.shape[2],
            n_tokens,
            n_head,
            head_dim,
            scale,
            CACHED=True,
            **tiles,
        )
    return out


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
    q, k, v = _same_layout(q, k, v)
    return launch_backward(dout.contiguous(), q, k, v, out.contiguous(), lse, scale)


@_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # or autograd makes zeros for the log-sum-exp
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
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


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`attention_reference` for a case: views of a packed projection."""
    width = 3 * shape["heads"] * shape["head_dim"]
    qkv = example(shape["rows"], shape["tokens"], width, dtype=dtype, device=device)
    q, k, v = qkv.unflatten(2, (3, shape["heads"], shape["head_dim"])).unbind(2)
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def cached_inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`launch_cached` for a case: the second of two chunks of that many
    tokens."""
    rows, tokens, heads, head_dim = (shape[n] for n in ("rows", "tokens", "heads", "head_dim"))
    caches = example(2, rows, heads, 2 * tokens, head_dim, dtype=dtype, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    starts, counts = (torch.full_like(slots, tokens) for _ in range(2))
    q = inputs(shape, dtype, device)["q"]
    return {
        **{"q": q, "k_cache": caches[0], "v_cache": caches[1]},
        **{"slots": slots, "starts": starts, "counts": counts, "scale": 0.125},
    }


def _launch_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    launch_forward(**inputs(shape, dtype, device))


def _launch_cached_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    launch_cached(**cached_inputs(shape, dtype, device))


def _launch_backward_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    q, k, v, scale = inputs(shape, dtype, device).values()
    size = (shape["rows"], shape["heads"], shape["tokens"])
    lse = example(*size, dtype=torch.float32, device=device)
    out, dout = (example(*q.shape, dtype=dtype, device=device) for _ in range(2))
    launch_backward(dout, q, k, v, out, lse, scale)


def _forward_work(shape: Shape, dtype: torch.dtype, start: int = 0) -> Work:
    tokens, width = shape["tokens"], shape["head_dim"] * dtype.itemsize
    heads = shape["rows"] * shape["heads"]
    tiles = _tiles(shape["head_dim"], dtype, cached=start > 0)
    firsts = range(0, tokens, tiles["BLOCK_M"])
    ends = [start + min(first + tiles["BLOCK_M"], tokens) for first in firsts]
    keys = sum(
        min(triton.cdiv(e, tiles["BLOCK_N"]) * tiles["BLOCK_N"], start + tokens) for e in ends
    )
    loaded = (tokens + 2 * keys) * width + (3 * 4 * len(ends) if start else 0)
    stored = tokens * width + (0 if start else 4 * tokens)
    distinct = heads * ((3 * tokens + 2 * start) * width + stored)
    distinct += 3 * 4 * shape["rows"] if start else 0
    pairs = tokens * start + tokens * (tokens + 1) // 2
    flops = heads * 4 * pairs * shape["head_dim"]
    return Work(heads * loaded, heads * stored, distinct, flops)


def _cached_work(shape: Shape, dtype: torch.dtype) -> Work:
    return _forward_work(shape, dtype, start=shape["tokens"])


PASSES = {
    "forward": Pass(_launch_case, _forward_work),
    "cached": Pass(_launch_cached_case, _cached_work),
    "backward": Pass(_launch_backward_case, backward_work),
}
