"""One decode step of the whole network on a CPU, as one function that Numba compiles.

At one token a step every weight is read for a single product, so the step can run at the speed of
memory, unless something stands between the products. In PyTorch that is a call, a check of its
arguments and a wake-up of the threads for each of about ten operations a layer. Here one function
goes through all layers, with a parallel loop inside each product and one over rows and heads for
the attention.

Products: ``function(x weight^T scale + bias)``. Weights are best stored small and widened in
registers. Three forms: float32; bfloat16, as its bits, which a shift turns into a float32; and int8
with one scale an output, multiplied with float32 activations: int8 activations would save
arithmetic, which is not what the step waits for. A task owns one output: it reads that row of
weights from memory once, and from the first-level cache again for each four rows of x, whose sums
it keeps in registers. Sums are fp32; their order is the compiler's, which vectorises them.

Attention: a task owns one head of one row. It appends the row's K and V to the cache, multiplies q
with the keys held so far, and takes their softmax in passes over the scores, which fit the
first-level cache. LayerNorm is done row by row, with sums in fp64.

Bytes, for R rows that hold L tokens: the weights once, each in its stored size, and
``8 R L n_layer C`` of the cache. FLOPs: ``2 R`` a weight, and ``4 R L n_layer C``.

Numba compiles for the machine it runs on at the first use, and keeps the code on disk; it looks for
changes in this file only, so everything that is compiled stands here.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from gptile.kernels.activations import ACTIVATIONS, REFERENCES
from gptile.kernels.small_linear import quantize_weight

PRECISIONS = ("float32", "bfloat16", "int8")
"""Of stored weights; all arithmetic is in float32."""

NO_FUNCTION = 0
FUNCTIONS = {name: code for code, name in enumerate(REFERENCES, NO_FUNCTION + 1)}
"""Codes of the functions that :data:`~gptile.kernels.activations.ACTIVATIONS` names."""
_ERF, _TANH, _RELU = FUNCTIONS["erf"], FUNCTIONS["tanh"], FUNCTIONS["relu"]

# A sum may be taken in any order, which vectors need; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz"}

CASES: dict[str, dict[str, int]] = {
    "gpt2-qkv": {"rows": 1, "n_in": 768, "n_out": 2304},
    "gpt2-head-batch": {"rows": 8, "n_in": 768, "n_out": 50257},
    "demo-fc": {"rows": 5, "n_in": 256, "n_out": 1024},
    "one past a block of rows": {"rows": 13, "n_in": 31, "n_out": 7},
    "smallest": {"rows": 1, "n_in": 1, "n_out": 1},
}
"""Shapes by name."""


class Packed(NamedTuple):
    """A linear map as the kernels read it.

    Attributes:
        weight: ``[N, K]``: float32, the bits of bfloat16 as uint16, or int8.
        scale: ``[N]`` float32 of int8 weights, else empty.
        bias: ``[N]`` float32, or empty.
    """

    weight: NDArray
    scale: NDArray
    bias: NDArray


class PackedNorm(NamedTuple):
    """A LayerNorm: ``[C]`` float32 each, and its epsilon, one for all layers."""

    weight: NDArray
    bias: NDArray
    eps: float


class PackedBlocks(NamedTuple):
    """All transformer blocks, each array with one more dimension before the others: the layer.

    Attributes:
        scales: ``[n_layer]`` float32, of the attention's scores.
    """

    ln_1: PackedNorm
    c_attn: Packed
    scales: NDArray
    attn_proj: Packed
    ln_2: PackedNorm
    c_fc: Packed
    mlp_proj: Packed


class PackedModel(NamedTuple):
    """A GPT-2 as :func:`decode_step` reads it.

    Attributes:
        wte: the token embedding; only its rows are looked up.
        wpe: ``[n_positions, C]`` float32.
        function: of the MLP, a value of :data:`FUNCTIONS`.
        head: ``[V, C]``, the embedding itself where they are tied.
    """

    wte: Packed
    wpe: NDArray
    blocks: PackedBlocks
    function: int
    ln_f: PackedNorm
    head: Packed


def pack(weight: Tensor, bias: Tensor | None, precision: str) -> Packed:
    """Store ``[N, K]`` weights; float32 ones on a CPU are used where they are, not copied.

    Raises:
        ValueError: for an unknown precision.
    """
    weight = weight.detach()
    scale = np.empty(0, np.float32)
    if precision == "float32":
        stored = weight.float().contiguous().numpy()
    elif precision == "bfloat16":
        stored = weight.bfloat16().contiguous().view(torch.uint16).numpy()
    elif precision == "int8":
        stored, scale = (part.numpy() for part in quantize_weight(weight))
    else:
        raise ValueError(f"precision is {precision!r}, not one of {', '.join(PRECISIONS)}")
    empty = np.empty(0, np.float32)
    return Packed(stored, scale, empty if bias is None else bias.detach().float().numpy())


def unpack(packed: Packed) -> Tensor:
    """``[N, K]`` float32: the numbers that the stored weights stand for."""
    if packed.weight.dtype == np.uint16:
        return torch.from_numpy(packed.weight).view(torch.bfloat16).float()
    weight = torch.from_numpy(packed.weight).float()
    return weight * torch.from_numpy(packed.scale)[:, None] if packed.scale.size else weight


def packed_linear_reference(x: Tensor, packed: Packed, activation: str | None = None) -> Tensor:
    """``activation(x weight^T + bias)`` in the dtype of x.

    Args:
        x: ``[R, K]``.
        packed: ``[N, K]`` weights.
        activation: a name in ACTIVATIONS, or None.

    Returns:
        ``[R, N]``.
    """
    out = x @ unpack(packed).to(x.dtype).T
    if packed.bias.size:
        out = out + torch.from_numpy(packed.bias).to(x.dtype)
    return out if activation is None else REFERENCES[ACTIVATIONS[activation]](out)


def packed_linear(x: Tensor, packed: Packed, activation: str | None = None) -> Tensor:
    """:func:`packed_linear_reference` of float32 ``[R, K]``, by the compiled product."""
    out = np.empty((len(x), len(packed.weight)), np.float32)
    code = NO_FUNCTION if activation is None else FUNCTIONS[ACTIVATIONS[activation]]
    product(x.contiguous().numpy(), packed, code, False, out)
    return torch.from_numpy(out)


def widen(stored):
    """A stored weight as float32, its scale left out. Only compiled code calls it."""
    raise NotImplementedError


@overload(widen, inline="always")
def _widen(stored):
    if stored == types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: np.float32(stored)


@njit(inline="always")
def activate(x, function):
    """A value of :data:`FUNCTIONS` at x."""
    if function == _TANH:
        u = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
        return np.float32(0.5) * x * (np.float32(1) + np.float32(np.tanh(u)))
    if function == _ERF:
        return np.float32(0.5) * x * np.float32(1 + math.erf(x * 0.7071067811865476))
    if function == _RELU:
        return np.float32(0) if x < 0 else x
    return x / (np.float32(1) + np.float32(np.exp(-x)))


@njit(inline="always")
def _finish(total, o, packed, function, add, before):
    if packed.scale.size:
        total *= packed.scale[o]
    if packed.bias.size:
        total += packed.bias[o]
    if function != NO_FUNCTION:
        total = activate(total, function)
    return before + total if add else total


@njit(parallel=True, fastmath=FASTMATH, cache=True)
def product(x, packed, function, add, out):
    """``out = function(x weight^T + bias)``, or that added to out.

    Args:
        x: ``[R, K]`` float32.
        packed: ``[N, K]`` weights.
        function: NO_FUNCTION or a value of FUNCTIONS.
        add: whether to add to what out holds, a residual.
        out: ``[R, N]`` float32.
    """
    n_rows, n_in = x.shape
    for o in prange(len(packed.weight)):
        weight = packed.weight[o]
        row = 0
        while row + 4 <= n_rows:
            x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
            a0 = a1 = a2 = a3 = np.float32(0)
            for i in range(n_in):
                w = widen(weight[i])
                a0 += w * x0[i]
                a1 += w * x1[i]
                a2 += w * x2[i]
                a3 += w * x3[i]
            out[row, o] = _finish(a0, o, packed, function, add, out[row, o])
            out[row + 1, o] = _finish(a1, o, packed, function, add, out[row + 1, o])
            out[row + 2, o] = _finish(a2, o, packed, function, add, out[row + 2, o])
            out[row + 3, o] = _finish(a3, o, packed, function, add, out[row + 3, o])
            row += 4
        while row < n_rows:
            x0, a0 = x[row], np.float32(0)
            for i in range(n_in):
                a0 += widen(weight[i]) * x0[i]
            out[row, o] = _finish(a0, o, packed, function, add, out[row, o])
            row += 1


@njit(fastmath=FASTMATH, cache=True)
def layer_norm(x, norm, out):
    """Of each row of ``[R, C]``; two passes, so that a large mean costs no digits."""
    n_rows, n_cols = x.shape
    for row in range(n_rows):
        total = 0.0
        for i in range(n_cols):
            total += x[row, i]
        mean = total / n_cols
        total = 0.0
        for i in range(n_cols):
            total += (x[row, i] - mean) ** 2
        rstd = 1.0 / np.sqrt(total / n_cols + norm.eps)
        for i in range(n_cols):
            out[row, i] = (x[row, i] - mean) * rstd * norm.weight[i] + norm.bias[i]


@njit(parallel=True, fastmath=FASTMATH, cache=True)
def append_and_attend(qkv, k_cache, v_cache, slots, starts, scale, scores, out):
    """Attention of one new token a row.

    Args:
        qkv: ``[R, 3 C]`` of the new tokens.
        k_cache, v_cache: ``[n_slots, n_head, max_len, head_dim]``, written at ``starts``.
        slots, starts: ``[R]`` where each row's tokens are, and how many it had.
        scale: of the scores.
        scores: ``[R * n_head, max_len]`` to work in.
        out: ``[R, C]``.
    """
    _, n_head, _, head_dim = k_cache.shape
    n_embd = n_head * head_dim
    for task in prange(len(qkv) * n_head):
        row, head = task // n_head, task % n_head
        slot, last, first = slots[row], starts[row], head * head_dim
        keys, values, p = k_cache[slot, head], v_cache[slot, head], scores[task]
        for i in range(head_dim):
            keys[last, i] = qkv[row, n_embd + first + i]
            values[last, i] = qkv[row, 2 * n_embd + first + i]
        q = qkv[row, first : first + head_dim]
        highest = np.float32(-np.inf)
        for t in range(last + 1):
            dot = np.float32(0)
            for i in range(head_dim):
                dot += q[i] * keys[t, i]
            p[t] = dot * np.float32(scale)
            highest = max(highest, p[t])
        total = np.float32(0)
        for t in range(last + 1):
            p[t] = np.exp(p[t] - highest)
            total += p[t]
        attended = out[row, first : first + head_dim]
        attended[:] = 0
        for t in range(last + 1):
            for i in range(head_dim):
                attended[i] += p[t] * values[t, i]
        for i in range(head_dim):
            attended[i] /= total


@njit(inline="always")
def _norm_of(norm, layer):
    return PackedNorm(norm.weight[layer], norm.bias[layer], norm.eps)


@njit(inline="always")
def _linear_of(packed, layer):
    return Packed(packed.weight[layer], packed.scale[layer], packed.bias[layer])


@njit(cache=True)
def decode_step(model, ids, k_cache, v_cache, slots, starts, logits):
    """One token a row through the network.

    Args:
        model: a :class:`PackedModel`.
        ids: ``[R]`` the tokens.
        k_cache, v_cache: ``[n_layer, n_slots, n_head, max_len, head_dim]`` float32; K and V of the
            tokens are written to them.
        slots, starts: ``[R]`` where each row's sequence is, and how many tokens it had: also the
            position of the new one.
        logits: ``[R, V]`` float32, the result.
    """
    blocks, n_rows, n_embd = model.blocks, len(ids), model.wpe.shape[1]
    _, _, n_head, max_len, _ = k_cache.shape
    x = np.empty((n_rows, n_embd), np.float32)
    for row in range(n_rows):
        scale = model.wte.scale[ids[row]] if model.wte.scale.size else np.float32(1)
        for i in range(n_embd):
            token = widen(model.wte.weight[ids[row], i]) * scale
            x[row, i] = token + model.wpe[starts[row], i]
    normed = np.empty((n_rows, n_embd), np.float32)
    attended = np.empty((n_rows, n_embd), np.float32)
    qkv = np.empty((n_rows, 3 * n_embd), np.float32)
    hidden = np.empty((n_rows, blocks.c_fc.weight.shape[1]), np.float32)
    scores = np.empty((n_rows * n_head, max_len), np.float32)
    for layer in range(len(blocks.scales)):
        layer_norm(x, _norm_of(blocks.ln_1, layer), normed)
        product(normed, _linear_of(blocks.c_attn, layer), NO_FUNCTION, False, qkv)
        caches, scale = (k_cache[layer], v_cache[layer]), blocks.scales[layer]
        append_and_attend(qkv, *caches, slots, starts, scale, scores, attended)
        product(attended, _linear_of(blocks.attn_proj, layer), NO_FUNCTION, True, x)
        layer_norm(x, _norm_of(blocks.ln_2, layer), normed)
        product(normed, _linear_of(blocks.c_fc, layer), model.function, False, hidden)
        product(hidden, _linear_of(blocks.mlp_proj, layer), NO_FUNCTION, True, x)
    layer_norm(x, model.ln_f, normed)
    product(normed, model.head, NO_FUNCTION, False, logits)
