"""An affine map of 1 to 16 rows with everything around it: what a decode step spends its time in.

``y = residual + activation(norm(x) @ weight.T + bias)``, where norm is the LayerNorm of
layer_norm.py; each part but the product is optional. ``weight`` is fp32, fp16 or bf16, or int8 with
one fp32 scale an output channel: ``scales[n] * weight[n]``.

Each weight is used once a row, so the time is that of reading the weights. One row: a program owns
a few output channels, holds the whole row of x in registers, normalised there, and multiplies
without tensor cores and without a loop (rows wider than 8192 take the other kernel). Else a program
owns BLOCK_N channels and walks over the inputs in blocks on the tensor cores, after two passes over
x for its statistics.

Bytes, for M rows of K inputs, N outputs, weights of w and the rest of s bytes: ``N K w`` once. The
rest is small and read again by each program, from L2: x (``M K s``, three times that for several
normalised rows) and ``2 K s`` of the norm's parameters. Stores ``M N s``. ``2 M N K`` FLOPs: the
intensity is M / 2 to 2 M FLOPs a byte, far below what a GPU could do. Exactly: :func:`_work`.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.activations import ACTIVATIONS, REFERENCES, activate
from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import (
    Pass,
    Shape,
    Work,
    check_inputs,
    check_operands,
    example,
    launch,
    rows_of,
)
from gptile.kernels.tiles import MIN_DOT, load_tile, product_options

MAX_ROWS = MIN_DOT
"""More rows reuse the weights enough for the tiled kernel, or the vendor's product."""
_ROW_TILE = 4096
"""Weights a program of one row holds: 32 a thread of 4 warps, and 192 programs for the smallest
product of GPT-2, 768 x 768."""
_WIDEST_ROW = 8192

CASES: dict[str, dict[str, Any]] = {
    "gpt2-qkv": {"few": 1, "in": 768, "out": 2304, "norm": True},
    "gpt2-proj": {"few": 1, "in": 768, "out": 768, "residual": True},
    "gpt2-fc": {"few": 1, "in": 768, "out": 3072, "norm": True, "activation": "gelu_new"},
    "gpt2-mlp-proj": {"few": 1, "in": 3072, "out": 768, "residual": True},
    "gpt2-xl-mlp-proj": {"few": 1, "in": 6400, "out": 1600, "residual": True},
    "gpt2-fc-batch": {"few": 8, "in": 768, "out": 3072, "norm": True, "activation": "gelu_new"},
    "gpt2-mlp-proj-batch": {"few": 16, "in": 3072, "out": 768, "residual": True},
    "gpt2-fc-int8": {
        **{"few": 1, "in": 768, "out": 3072, "norm": True, "activation": "gelu_new"},
        "int8": True,
    },
    "gpt2-mlp-proj-batch-int8": {
        **{"few": 5, "in": 3072, "out": 768, "residual": True, "int8": True}
    },
    "one row too wide": {"few": 1, "in": 8193, "out": 3, "norm": True},
    "odd": {"few": 1, "in": 33, "out": 7, "norm": True, "residual": True, "activation": "gelu"},
    "odd rows": {"few": 3, "in": 259, "out": 17, "norm": True, "activation": "relu"},
}
"""Shapes by name: what GPT-2 launches, and ragged ones. ``few`` is the number of rows."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` as int8 and one fp32 scale a row, symmetric: the largest entry is 127."""
    scales = weight.float().abs().amax(dim=1) / 127
    scales = torch.where(scales == 0, 1.0, scales)  # what is not finite stays so, and shows
    return (weight.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


def small_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``residual + activation(norm(x) @ (scales * weight).T + bias)``.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, or int8 with ``scales [N]`` (:func:`quantize_weight`).
        bias: ``[N]``.
        norm: weight ``[K]``, bias ``[K]`` and epsilon of a LayerNorm of x.
        activation: a key of :data:`~gptile.kernels.activations.ACTIVATIONS`.
        residual: ``[..., N]``.

    Returns:
        ``[..., N]`` in the dtype of x.
    """
    if norm is not None:
        x = F.layer_norm(x, norm[0].shape, norm[0], norm[1], norm[2])
    if scales is not None:
        weight = weight * scales.unsqueeze(1)
    y = F.linear(x, weight.to(x.dtype), bias)
    if activation is not None:
        y = REFERENCES[ACTIVATIONS[activation]](y)
    return y if residual is None else residual + y


@triton.jit
def _row_kernel(
    x_ptr,  # input, [n_in]
    weight_ptr,  # [n_out, n_in]
    scales_ptr,  # fp32 scale of each weight row, [n_out]; unused without HAS_SCALES
    bias_ptr,  # [n_out]; unused without HAS_BIAS
    norm_weight_ptr,  # [n_in]; unused without HAS_NORM, as the next
    norm_bias_ptr,  # [n_in]
    residual_ptr,  # [n_out]; unused without HAS_RESIDUAL
    out_ptr,  # [n_out]
    x_row_stride,  # elements between rows of x, as the next three for the other kernel only
    residual_row_stride,  # elements between rows of the residual
    weight_row_stride,  # elements between rows of the weight
    n_rows,  # 1
    n_in,  # width of x
    n_out,  # width of the output
    eps,  # added to the variance
    HAS_SCALES: tl.constexpr,  # the weight is int8
    HAS_BIAS: tl.constexpr,  # add the bias
    HAS_NORM: tl.constexpr,  # normalise x
    HAS_RESIDUAL: tl.constexpr,  # add the residual
    FUNCTION: tl.constexpr,  # activation
    BLOCK_N: tl.constexpr,  # output channels a program owns
    BLOCK_K: tl.constexpr,  # power of two >= n_in
):
    outs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = tl.arange(0, BLOCK_K)
    mask = ins < n_in
    weight = load_tile(weight_ptr, weight_row_stride, outs, ins, n_out, n_in, FP32=True)
    x = tl.load(x_ptr + ins, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + ins, mask=mask, other=0.0).to(tl.float32)
        norm_bias = tl.load(norm_bias_ptr + ins, mask=mask, other=0.0).to(tl.float32)
        # As in layer_norm.py: corrected mean, and a pass of its own for the variance.
        centred = tl.where(mask, x - tl.sum(x, axis=0) / n_in, 0.0)
        centred = tl.where(mask, centred - tl.sum(centred, axis=0) / n_in, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / n_in + eps)
        x = centred * rstd * norm_weight + norm_bias
    y = tl.sum(weight * x[None, :], axis=1)
    mask = outs < n_out
    if HAS_SCALES:
        y *= tl.load(scales_ptr + outs, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    y = activate(y, FUNCTION)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rows_kernel(
    x_ptr,  # input, [n_rows, n_in]
    weight_ptr,  # [n_out, n_in]
    scales_ptr,  # fp32 scale of each weight row, [n_out]; unused without HAS_SCALES
    bias_ptr,  # [n_out]; unused without HAS_BIAS
    norm_weight_ptr,  # [n_in]; unused without HAS_NORM, as the next
    norm_bias_ptr,  # [n_in]
    residual_ptr,  # [n_rows, n_out]; unused without HAS_RESIDUAL
    out_ptr,  # [n_rows, n_out] contiguous
    x_row_stride,  # elements between rows of x
    residual_row_stride,  # elements between rows of the residual
    weight_row_stride,  # elements between rows of the weight
    n_rows,  # at most BLOCK_M
    n_in,  # width of x
    n_out,  # width of the output
    eps,  # added to the variance
    HAS_SCALES: tl.constexpr,  # the weight is int8
    HAS_BIAS: tl.constexpr,  # add the bias
    HAS_NORM: tl.constexpr,  # normalise x
    HAS_RESIDUAL: tl.constexpr,  # add the residual
    FUNCTION: tl.constexpr,  # activation
    BLOCK_M: tl.constexpr,  # rows, padded
    BLOCK_N: tl.constexpr,  # output channels a program owns
    BLOCK_K: tl.constexpr,  # inputs a step
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    rows = tl.arange(0, BLOCK_M)
    outs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
    rest = tl.zeros((BLOCK_M,), dtype=tl.float32)
    rstd = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if HAS_NORM:
        for first in range(0, n_in, BLOCK_K):
            ins = first + tl.arange(0, BLOCK_K)
            mean += tl.sum(load_tile(x_ptr, x_row_stride, rows, ins, n_rows, n_in, True), axis=1)
        mean /= n_in
        for first in range(0, n_in, BLOCK_K):
            ins = first + tl.arange(0, BLOCK_K)
            x = load_tile(x_ptr, x_row_stride, rows, ins, n_rows, n_in, True)
            centred = tl.where(ins[None, :] < n_in, x - mean[:, None], 0.0)
            rest += tl.sum(centred, axis=1)
            rstd += tl.sum(centred * centred, axis=1)
        # What the rounding of the mean left over is small, so its square does not cancel.
        rest /= n_in
        rstd = 1.0 / tl.sqrt(rstd / n_in - rest * rest + eps)
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, n_in, BLOCK_K):
        ins = first + tl.arange(0, BLOCK_K)
        weight = load_tile(weight_ptr, weight_row_stride, outs, ins, n_out, n_in, FP32)
        x = load_tile(x_ptr, x_row_stride, rows, ins, n_rows, n_in, FP32)
        if HAS_NORM:
            mask = ins < n_in
            norm_weight = tl.load(norm_weight_ptr + ins, mask=mask, other=0.0).to(tl.float32)
            norm_bias = tl.load(norm_bias_ptr + ins, mask=mask, other=0.0).to(tl.float32)
            centred = x.to(tl.float32) - mean[:, None] - rest[:, None]
            normed = centred * rstd[:, None] * norm_weight[None, :] + norm_bias[None, :]
            x = normed.to(x.dtype)
        y += tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision=PRECISION)
    mask = outs < n_out
    if HAS_SCALES:
        y *= tl.load(scales_ptr + outs, mask=mask, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + outs, mask=mask, other=0.0).to(tl.float32)[None, :]
    y = activate(y, FUNCTION)
    if HAS_RESIDUAL:
        y += load_tile(residual_ptr, residual_row_stride, rows, outs, n_rows, n_out, True)
    mask = (rows[:, None] < n_rows) & mask[None, :]
    offsets = rows[:, None] * n_out + outs[None, :]
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def _tiles(n_rows: int, n_in: int, dtype: torch.dtype) -> dict[str, Any]:
    if n_rows == 1 and n_in <= _WIDEST_ROW:
        block_k = triton.next_power_of_2(n_in)
        block_n = max(1, _ROW_TILE // block_k)
        return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4 if block_k <= 4096 else 8}
    # The fewest channels a program, as 768 of them make only 48 programs; deep
    # blocks and stages for bytes in flight, within the 64 KB of an MI300X and, in fp32, the
    # registers.
    block_k = 64 if dtype == torch.float32 else 128
    sizes = {"BLOCK_M": MIN_DOT, "BLOCK_N": MIN_DOT, "BLOCK_K": block_k}
    return {**sizes, **product_options(dtype), "num_warps": 4, "num_stages": 3}


def launch_forward(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """``[..., N]``; the arguments of :func:`small_linear_reference`, the norm's one by one."""
    check_inputs(x)
    rows = rows_of(x)
    (n_rows, n_in), n_out = rows.shape, len(weight)
    if n_rows > MAX_ROWS:
        raise ValueError(f"{n_rows} rows exceed the {MAX_ROWS} of this kernel")
    if (weight.dtype == torch.int8) != (scales is not None):
        raise TypeError("int8 weights need scales, and only they")
    size = (*x.shape[:-1], n_out)
    check_operands(
        x,
        bias=(bias, (n_out,)),
        norm_weight=(norm_weight, (n_in,)),
        norm_bias=(norm_bias, (n_in,)),
        residual=(residual, size),
    )
    check_operands(weight if scales is not None else x, weight=(weight, (n_out, n_in)))
    if scales is not None:
        check_operands(scales.float(), scales=(scales, (n_out,)))
    out = torch.empty(size, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tiles = _tiles(n_rows, n_in, x.dtype)
    added = out.view(n_rows, n_out) if residual is None else rows_of(residual)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    launch(
        _rows_kernel if "BLOCK_M" in tiles else _row_kernel,
        (triton.cdiv(n_out, tiles["BLOCK_N"]),),
        rows,
        weight,
        out if scales is None else scales.contiguous(),
        out if bias is None else bias.contiguous(),
        out if norm_weight is None else norm_weight.contiguous(),
        out if norm_bias is None else norm_bias.contiguous(),
        added,
        out,
        rows.stride(0),
        added.stride(0),
        weight.stride(0),
        n_rows,
        n_in,
        n_out,
        eps,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        FUNCTION="none" if activation is None else ACTIVATIONS[activation],
        **tiles,
    )
    return out


@torch.library.custom_op("gptile::small_linear", mutates_args=())
def _small_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    return launch_forward(
        x, weight, scales, bias, norm_weight, norm_bias, eps, activation, residual
    )


@_small_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def small_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`small_linear_reference` in one kernel, for at most :data:`MAX_ROWS` rows. Not
    differentiable."""
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    return _small_linear(x, weight, scales, bias, norm_weight, norm_bias, eps, activation, residual)


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`small_linear_reference` for a case."""
    few, n_in, n_out = shape["few"], shape["in"], shape["out"]
    make = partial(example, dtype=dtype, device=device)
    weight, scales = make(n_out, n_in) * n_in**-0.5, None
    if shape.get("int8"):
        weight, scales = quantize_weight(weight)
    return {
        "x": make(few, n_in),
        "weight": weight,
        "bias": make(n_out),
        "scales": scales,
        "norm": (make(n_in), make(n_in), 1e-5) if shape.get("norm") else None,
        "activation": shape.get("activation"),
        "residual": make(few, n_out) if shape.get("residual") else None,
    }


def _launch_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    given = inputs(shape, dtype, device)
    norm_weight, norm_bias, eps = given.pop("norm") or (None, None, 0.0)
    launch_forward(**given, norm_weight=norm_weight, norm_bias=norm_bias, eps=eps)


def _work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, n_in, n_out, size = shape["few"], shape["in"], shape["out"], dtype.itemsize
    tiles = _tiles(rows, n_in, dtype)
    programs = triton.cdiv(n_out, tiles["BLOCK_N"])
    norm, residual, int8 = (bool(shape.get(n)) for n in ("norm", "residual", "int8"))
    reads_of_x = 3 if norm and "BLOCK_M" in tiles else 1
    once = n_out * n_in * (1 if int8 else size) + n_out * (size + 4 * int8)
    once += residual * rows * n_out * size
    stored = rows * n_out * size
    loaded = once + programs * (reads_of_x * rows + 2 * norm) * n_in * size
    distinct = once + (rows + 2 * norm) * n_in * size + stored
    return Work(loaded, stored, distinct, 2 * rows * n_out * n_in)


PASSES = {"forward": Pass(_launch_case, _work)}
