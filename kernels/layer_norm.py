"""LayerNorm over the last dimension, alone and fused with the residual addition before it.

``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` with the biased variance, as in
Ba et al. 2016 (https://arxiv.org/abs/1607.06450). Statistics are taken in fp32 for 16-bit inputs,
the variance in a pass of its own over registers after a corrected mean, so that a large mean does
not cancel. (PyTorch's CPU kernel computes ``x * rstd - mean * rstd``, which cancels where the mean
is thousands of times the spread.) The backward pass knows the mean as one fp32 number only.

Tiling. A program owns one row of C columns, padded to a power of two: one load, both passes in
registers, one store. Backward, a program owns a run of consecutive rows and keeps its share of the
weight's and the bias's gradient in registers; a second kernel adds the shares of all programs in a
fixed order. No atomics, so the same input gives the same bits.

Bytes, for R rows of elements of s bytes and P backward programs: forward loads ``4 R C s`` (x,
delta, weight, bias; 3 without delta) and stores ``2 R C s + 8 R`` (sum, y; mean and rstd); backward
loads ``R (3 C s + 8) + P C s + 8 P C`` (dy, dsum, x; the weight once a program; the shares) and
stores ``R C s + 8 P C + 2 C s``. The weight's re-reads come from L2. About 8 FLOPs an element
forward, 12 backward: memory bound.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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

MAX_COLUMNS = 16384
"""A row must fit the registers of one program."""
_MAX_PROGRAMS = 256
_REDUCE_COLUMNS, _REDUCE_ROWS = 64, 32

CASES: dict[str, dict[str, int]] = {
    "gpt2-decode": {"rows": 1, "cols": 768},
    "gpt2-prefill": {"rows": 1024, "cols": 768},
    "gpt2-medium-prefill": {"rows": 1024, "cols": 1024},
    "gpt2-large-prefill": {"rows": 1024, "cols": 1280},
    "gpt2-xl-prefill": {"rows": 1024, "cols": 1600},
    "gpt2-train": {"rows": 8192, "cols": 768},
    "demo-train": {"rows": 3072, "cols": 256},
    "one column": {"rows": 3, "cols": 1},
    "three columns": {"rows": 5, "cols": 3},
    "odd": {"rows": 300, "cols": 17},
    "one past a block": {"rows": 7, "cols": 1025},
}
"""Shapes by name: what GPT-2 launches, and ragged ones."""


def rows_per_program(rows: int) -> int:
    """Consecutive rows a backward program owns: fixed by the shape alone, so that the sums are
    taken in one order on every GPU."""
    return max(1, -(-rows // _MAX_PROGRAMS))


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise ``x [..., C]`` with ``weight [C]`` and ``bias [C]``; same shape and dtype out."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``delta`` to the residual stream ``x`` and normalise the sum (all ``[..., C]``).

    Returns:
        ``(x + delta, layer_norm(x + delta))``: the new residual stream and the sublayer's input.
    """
    total = x + delta
    return total, layer_norm_reference(total, weight, bias, eps)


@triton.jit
def _forward_kernel(
    x_ptr,  # input, [n_rows, n_cols]
    delta_ptr,  # added to the input first, [n_rows, n_cols]; unused without HAS_DELTA
    sum_ptr,  # their sum, [n_rows, n_cols] contiguous; unused without HAS_DELTA
    y_ptr,  # output, [n_rows, n_cols] contiguous
    weight_ptr,  # [n_cols]
    bias_ptr,  # [n_cols]
    mean_ptr,  # fp32 mean of each row, [n_rows]
    rstd_ptr,  # fp32 1 / sqrt(var + eps) of each row, [n_rows]
    x_row_stride,  # elements between rows of x
    delta_row_stride,  # elements between rows of delta
    n_cols,  # width of a row
    eps,  # added to the variance
    HAS_DELTA: tl.constexpr,  # add delta and store the sum
    BLOCK: tl.constexpr,  # power of two >= n_cols
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_row_stride + cols, mask=mask, other=0.0)
        # The stream is kept in its own dtype: normalise what is stored, as the unfused pair does.
        total = (x + delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * n_cols + cols, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(mask, x - mean, 0.0)  # padding must not count: it would add mean^2
    # The sum of x was rounded at the size of x; what is left of the mean is at that of its spread.
    rest = tl.sum(centred, axis=0) / n_cols
    mean += rest
    centred = tl.where(mask, centred - rest, 0.0)
    variance = tl.sum(centred * centred, axis=0) / n_cols
    rstd = 1.0 / tl.sqrt(variance + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    dy_ptr,  # gradient of the output, [n_rows, n_cols]
    dsum_ptr,  # gradient of the sum, [n_rows, n_cols]; unused without HAS_DSUM
    x_ptr,  # what was normalised, [n_rows, n_cols]
    weight_ptr,  # [n_cols]
    mean_ptr,  # of the forward pass, [n_rows]
    rstd_ptr,  # of the forward pass, [n_rows]
    dx_ptr,  # gradient of what was normalised, [n_rows, n_cols] contiguous
    dweight_ptr,  # fp32 share of each program, [n_programs, n_cols]
    dbias_ptr,  # fp32 share of each program, [n_programs, n_cols]
    dy_row_stride,  # elements between rows of dy
    dsum_row_stride,  # elements between rows of dsum
    x_row_stride,  # elements between rows of x
    n_rows,  # number of rows
    n_cols,  # width of a row
    run,  # consecutive rows a program owns
    HAS_DSUM: tl.constexpr,  # add the gradient of the sum
    BLOCK: tl.constexpr,  # power of two >= n_cols
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program * run
    last = tl.minimum(first + run, n_rows)
    for row in range(first, last):
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        normed = tl.where(mask, (x - mean) * rstd, 0.0)
        scaled = dy * weight
        along_normed = tl.sum(scaled * normed, axis=0) / n_cols
        along_ones = tl.sum(scaled, axis=0) / n_cols
        dx = rstd * (scaled - along_ones - normed * along_normed)
        if HAS_DSUM:
            dsum = tl.load(dsum_ptr + row * dsum_row_stride + cols, mask=mask, other=0.0)
            dx += dsum.to(tl.float32)
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * normed
        dbias += dy
    tl.store(dweight_ptr + program * n_cols + cols, dweight, mask=mask)
    tl.store(dbias_ptr + program * n_cols + cols, dbias, mask=mask)


@triton.jit
def _reduce_kernel(
    dweight_share_ptr,  # fp32, [n_programs, n_cols]
    dbias_share_ptr,  # fp32, [n_programs, n_cols]
    dweight_ptr,  # [n_cols]
    dbias_ptr,  # [n_cols]
    n_programs,  # shares to add
    n_cols,  # width of a row
    ROWS: tl.constexpr,  # shares added at a time
    COLUMNS: tl.constexpr,  # columns a program owns
):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, n_programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows[:, None] < n_programs) & (cols[None, :] < n_cols)
        offsets = rows[:, None] * n_cols + cols[None, :]
        dweight += tl.load(dweight_share_ptr + offsets, mask=mask, other=0.0)
        dbias += tl.load(dbias_share_ptr + offsets, mask=mask, other=0.0)
    mask = cols < n_cols
    total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + cols, total, mask=mask)
    total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + cols, total, mask=mask)


def _shape(n_cols: int) -> dict[str, int]:
    """Block size and warps: a row in one block, 8 elements a thread up to 4096 columns."""
    if n_cols > MAX_COLUMNS:
        raise ValueError(f"rows of {n_cols} columns exceed the {MAX_COLUMNS} of this kernel")
    block = triton.next_power_of_2(n_cols)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def launch_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(sum, y, mean, rstd)``; ``sum`` is empty without ``delta``."""
    check_inputs(x, weight, bias)
    check_operands(x, delta=(delta, x.shape))
    rows = rows_of(x)
    n_rows, n_cols = rows.shape
    check_operands(weight, weight=(weight, (n_cols,)), bias=(bias, (n_cols,)))
    added = rows if delta is None else rows_of(delta)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(0 if delta is None else x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if n_rows:
        launch(
            _forward_kernel,
            (n_rows,),
            rows,
            added,
            total if delta is not None else y,
            y,
            weight.contiguous(),
            bias.contiguous(),
            mean,
            rstd,
            rows.stride(0),
            added.stride(0),
            n_cols,
            eps,
            HAS_DELTA=delta is not None,
            **_shape(n_cols),
        )
    return total, y, mean, rstd


def launch_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)``."""
    rows, dy_rows = rows_of(x), rows_of(dy)
    n_rows, n_cols = rows.shape
    dsum_rows = dy_rows if dsum is None else rows_of(dsum)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run = rows_per_program(n_rows)
    n_programs = -(-n_rows // run)
    shares = torch.empty(2, n_programs, n_cols, dtype=torch.float32, device=x.device)
    dweight, dbias = torch.zeros_like(weight), torch.zeros_like(weight)
    if n_rows:
        launch(
            _backward_kernel,
            (n_programs,),
            dy_rows,
            dsum_rows,
            rows,
            weight.contiguous(),
            mean,
            rstd,
            dx,
            shares[0],
            shares[1],
            dy_rows.stride(0),
            dsum_rows.stride(0),
            rows.stride(0),
            n_rows,
            n_cols,
            run,
            HAS_DSUM=dsum is not None,
            **_shape(n_cols),
        )
        launch(
            _reduce_kernel,
            (triton.cdiv(n_cols, _REDUCE_COLUMNS),),
            shares[0],
            shares[1],
            dweight,
            dbias,
            n_programs,
            n_cols,
            ROWS=_REDUCE_ROWS,
            COLUMNS=_REDUCE_COLUMNS,
            num_warps=4,
        )
    return dx, dweight, dbias


@torch.library.custom_op("gptile::layer_norm", mutates_args=())
def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_forward(x, None, weight, bias, eps)[1:]


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), mean, torch.empty_like(mean)


@torch.library.custom_op("gptile::add_layer_norm", mutates_args=())
def _add_layer_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return launch_forward(x, delta, weight, bias, eps)


@_add_layer_norm.register_fake
def _(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, torch.empty_like(total), mean, torch.empty_like(mean)


@torch.library.custom_op("gptile::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_backward(dy, dsum, x, weight, mean, rstd)


@_layer_norm_backward.register_fake
def _(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # or autograd makes zeros for mean and rstd
    _, weight, *_ = inputs
    ctx.save_for_backward(inputs[0], weight, *output[-2:])


def _save_sum(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    total, _, mean, rstd = output
    ctx.save_for_backward(total, inputs[2], mean, rstd)


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*_layer_norm_backward(dy, None, *ctx.saved_tensors), None)


def _differentiate_sum(
    ctx: Any, dsum: Tensor | None, dy: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if dy is None:  # only the sum was used
        return dsum, dsum, None, None, None
    dx, dweight, dbias = _layer_norm_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, dbias, None


_layer_norm.register_autograd(_differentiate, setup_context=_save)
_add_layer_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)


def layer_norm_triton(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """:func:`layer_norm_reference` in one kernel. Differentiable once."""
    return _layer_norm(x, weight, bias, eps)[0]


def add_layer_norm_triton(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`add_layer_norm_reference` in one kernel. Differentiable once."""
    total, y, _, _ = _add_layer_norm(x, delta, weight, bias, eps)
    return total, y


def inputs(shape: Shape, dtype: torch.dtype, device: Any, *, add: bool) -> dict[str, Any]:
    """The arguments of :func:`layer_norm_reference` for a case, or of the one with ``add``."""
    make = partial(example, dtype=dtype, device=device)
    x = make(shape["rows"], shape["cols"]) + 1  # a mean that is forgotten shows
    delta = {"delta": make(shape["rows"], shape["cols"])} if add else {}
    return {
        "x": x,
        **delta,
        "weight": make(shape["cols"]),
        "bias": make(shape["cols"]),
        "eps": 1e-5,
    }


def _launch_forward(shape: Shape, dtype: torch.dtype, device: Any, *, add: bool) -> None:
    launch_forward(**{"delta": None, **inputs(shape, dtype, device, add=add)})


def _launch_backward(shape: Shape, dtype: torch.dtype, device: Any, *, add: bool) -> None:
    make = partial(example, dtype=dtype, device=device)
    x, dy, dsum = (make(shape["rows"], shape["cols"]) for _ in range(3))
    mean, rstd = (example(shape["rows"], dtype=torch.float32, device=device) for _ in range(2))
    launch_backward(dy, dsum if add else None, x, make(shape["cols"]), mean, rstd)


def _forward_work(shape: Shape, dtype: torch.dtype, *, add: bool) -> Work:
    rows, elements = shape["rows"], shape["rows"] * shape["cols"]
    tensors = 2 if add else 1
    stored = tensors * elements * dtype.itemsize + 2 * 4 * rows
    distinct = (tensors * elements + 2 * shape["cols"]) * dtype.itemsize + stored
    loaded = (tensors + 2) * elements * dtype.itemsize
    return Work(loaded, stored, distinct, (8 + add) * elements)


def _backward_work(shape: Shape, dtype: torch.dtype, *, add: bool) -> Work:
    rows, cols, itemsize = shape["rows"], shape["cols"], dtype.itemsize
    programs = -(-rows // rows_per_program(rows))
    shares = 2 * 4 * programs * cols
    per_row = (3 if add else 2) * cols * itemsize + 2 * 4
    loaded = rows * per_row + programs * cols * itemsize + shares
    stored = rows * cols * itemsize + shares + 2 * cols * itemsize
    distinct = loaded - (programs - 1) * cols * itemsize + stored
    return Work(loaded, stored, distinct, (12 + add) * rows * cols)


PASSES = {
    f"{'add ' if add else ''}{name}": Pass(partial(run, add=add), partial(work, add=add))
    for add in (False, True)
    for name, run, work in (
        ("forward", _launch_forward, _forward_work),
        ("backward", _launch_backward, _backward_work),
    )
}
