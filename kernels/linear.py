"""Affine maps in the ``nn.Linear`` layout, with what stands around them in GPT-2:

- linear: ``x @ weight.T + bias``,
- linear_activation: ``activation(x @ weight.T + bias)``,
- linear_residual: ``residual + x @ weight.T + bias``,
- layer_norm_linear: ``activation(layer_norm(x) @ weight.T + bias)``.

Where nothing is differentiated and there are at most 16 rows, all four are small_linear.py's
kernels. A large plain product is the vendor's (cuBLAS through PyTorch), forward and backward:
nothing in Triton is better at it, and it has nothing to fuse. What is here is the product with an
activation or a residual as its epilogue, and the backward pass of the activation.

Tiling. A program owns BLOCK_M x BLOCK_N outputs and walks over the inputs in blocks of BLOCK_K;
programs that share rows of x run together, in groups, so that x comes from L2. The epilogue works
on the fp32 accumulator: what PyTorch would store and load again never leaves the registers. For the
backward pass the activation's argument is stored beside its value, as PyTorch stores it. Backward,
one kernel multiplies by the activation's slope and adds up the bias's gradient on the way, a run of
rows a program; PyTorch adds the programs' shares, in a fixed order.

For M rows of K inputs, N outputs of s bytes and tiles of m x n: ``2 M N K`` FLOPs; loads
``(M K ceil(N / n) + N K ceil(M / m)) s`` bytes, all but the first of each from L2, and ``M N s`` of
a residual; stores ``M N s``, twice that with the argument kept. Backward loads ``2 M N s`` and
stores ``M N s`` and the fp32 shares. Exactly: :func:`_forward_work`, :func:`_backward_work`.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.activations import ACTIVATIONS, REFERENCES, activate, slope
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
from gptile.kernels.layer_norm import layer_norm_reference, layer_norm_triton
from gptile.kernels.small_linear import MAX_ROWS, small_linear_triton
from gptile.kernels.tiles import load_tile, product_options

CASES: dict[str, dict[str, Any]] = {
    "gpt2-fc-train": {"rows": 8192, "in": 768, "out": 3072, "activation": "gelu_new"},
    "gpt2-fc-prefill": {"rows": 512, "in": 768, "out": 3072, "activation": "gelu_new"},
    "gpt2-proj-prefill": {"rows": 512, "in": 768, "out": 768},
    "gpt2-mlp-proj-prefill": {"rows": 512, "in": 3072, "out": 768},
    "gpt2-xl-fc-train": {"rows": 8192, "in": 1600, "out": 6400, "activation": "gelu_new"},
    "erf": {"rows": 70, "in": 96, "out": 200, "activation": "gelu"},
    "odd": {"rows": 65, "in": 33, "out": 129, "activation": "silu"},
    "one row": {"rows": 1, "in": 7, "out": 5, "activation": "relu"},
}
"""Shapes by name: what GPT-2 launches, and ragged ones; with a residual where there is no
activation."""

_GROUP = 8
"""Rows of tiles that run together."""
_ENOUGH_TILES = 256
"""Larger tiles read less, but too few of them leave multiprocessors idle."""
_SLOPE_COLUMNS = 256
_SLOPE_PROGRAMS = 128
"""Runs of rows of the backward kernel at most: the shares stay small beside the gradient."""


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]``, ``weight [N, K]``, ``bias [N]`` -> ``[..., N]``."""
    return F.linear(x, weight, bias)


def linear_activation_reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """``activation(x @ weight.T + bias)``; ``activation`` is a key of
    :data:`~gptile.kernels.activations.ACTIVATIONS`."""
    return REFERENCES[ACTIVATIONS[activation]](F.linear(x, weight, bias))


def linear_residual_reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """``residual + x @ weight.T + bias``, with ``residual [..., N]``."""
    return residual + F.linear(x, weight, bias)


def layer_norm_linear_reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``activation(layer_norm(x) @ weight.T + bias)``; an activation comes with a bias."""
    y = F.linear(layer_norm_reference(x, norm_weight, norm_bias, eps), weight, bias)
    return y if activation is None else REFERENCES[ACTIVATIONS[activation]](y)


@triton.jit
def _product_kernel(
    x_ptr,  # input, [n_rows, n_in]
    weight_ptr,  # [n_out, n_in]
    bias_ptr,  # [n_out]
    residual_ptr,  # [n_rows, n_out]; unused without HAS_RESIDUAL
    out_ptr,  # [n_rows, n_out] contiguous
    argument_ptr,  # of the activation, [n_rows, n_out] contiguous; unused without KEEP_ARGUMENT
    x_row_stride,  # elements between rows of x
    weight_row_stride,  # elements between rows of the weight
    residual_row_stride,  # elements between rows of the residual
    n_rows,  # rows of x
    n_in,  # width of x
    n_out,  # width of the output
    FUNCTION: tl.constexpr,  # activation
    KEEP_ARGUMENT: tl.constexpr,  # store the activation's argument
    HAS_RESIDUAL: tl.constexpr,  # add the residual
    GROUP: tl.constexpr,  # rows of tiles that run together
    BLOCK_M: tl.constexpr,  # rows a program owns
    BLOCK_N: tl.constexpr,  # output channels a program owns
    BLOCK_K: tl.constexpr,  # inputs a step
    PRECISION: tl.constexpr,  # of fp32 products
    FP32: tl.constexpr,  # convert tiles to fp32
):
    n_tile_rows = tl.cdiv(n_rows, BLOCK_M)
    n_tile_cols = tl.cdiv(n_out, BLOCK_N)
    group = tl.program_id(0) // (GROUP * n_tile_cols)
    within = tl.program_id(0) % (GROUP * n_tile_cols)
    height = tl.minimum(n_tile_rows - group * GROUP, GROUP)
    first_row = ((group * GROUP + within % height) * BLOCK_M).to(tl.int64)
    first_out = ((within // height) * BLOCK_N).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    outs = tl.arange(0, BLOCK_N)
    rows_left = (n_rows - first_row).to(tl.int32)
    outs_left = (n_out - first_out).to(tl.int32)
    x_ptr += first_row * x_row_stride
    weight_ptr += first_out * weight_row_stride
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, n_in, BLOCK_K):
        ins = first + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, x_row_stride, rows, ins, rows_left, n_in, FP32)
        weight = load_tile(weight_ptr, weight_row_stride, outs, ins, outs_left, n_in, FP32)
        y += tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    bias = tl.load(bias_ptr + first_out + outs, mask=outs < outs_left, other=0.0)
    y += bias.to(tl.float32)[None, :]
    mask = (rows[:, None] < rows_left) & (outs[None, :] < outs_left)
    offsets = (first_row + rows[:, None]) * n_out + first_out + outs[None, :]
    if KEEP_ARGUMENT:
        tl.store(argument_ptr + offsets, y.to(argument_ptr.dtype.element_ty), mask=mask)
    y = activate(y, FUNCTION)
    if HAS_RESIDUAL:
        residual_ptr += first_row * residual_row_stride + first_out
        y += load_tile(residual_ptr, residual_row_stride, rows, outs, rows_left, outs_left, True)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slope_kernel(
    dout_ptr,  # gradient of the activation's value, [n_rows, n_cols]
    argument_ptr,  # of the activation, [n_rows, n_cols] contiguous
    dargument_ptr,  # its gradient, [n_rows, n_cols] contiguous
    dbias_ptr,  # fp32 share of each program, [n_programs, n_cols]
    dout_row_stride,  # elements between rows of dout
    n_rows,  # number of rows
    n_cols,  # width of a row
    run,  # consecutive rows a program owns
    FUNCTION: tl.constexpr,  # activation
    BLOCK: tl.constexpr,  # columns a program owns
):
    program = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    first = program * run
    for row in range(first, tl.minimum(first + run, n_rows)):
        dout = tl.load(dout_ptr + row * dout_row_stride + cols, mask=mask, other=0.0)
        argument = tl.load(argument_ptr + row * n_cols + cols, mask=mask, other=0.0)
        gradient = dout.to(tl.float32) * slope(argument.to(tl.float32), FUNCTION)
        dbias += gradient
        gradient = gradient.to(dargument_ptr.dtype.element_ty)
        tl.store(dargument_ptr + row * n_cols + cols, gradient, mask=mask)
    tl.store(dbias_ptr + program * n_cols + cols, dbias, mask=mask)


def _tiles(n_rows: int, n_out: int, dtype: torch.dtype) -> dict[str, Any]:
    """fp32 products run on the ordinary cores, from registers: small tiles."""
    if dtype == torch.float32:
        block_m, block_n, block_k, warps = 64, 64, 16, 8
    elif triton.cdiv(n_rows, 128) * triton.cdiv(n_out, 128) >= _ENOUGH_TILES:
        block_m, block_n, block_k, warps = 128, 128, 32, 8
    else:
        block_m, block_n, block_k, warps = 64, 64, 32, 4
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return {**sizes, **product_options(dtype), "num_warps": warps, "num_stages": 3}


def _run_of_rows(n_rows: int) -> int:
    """Rows a program of the backward kernel owns: fixed by the shape alone."""
    return max(1, triton.cdiv(n_rows, _SLOPE_PROGRAMS))


def launch_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    activation: str | None,
    residual: Tensor | None,
    keep_argument: bool,
) -> tuple[Tensor, Tensor]:
    """``(out [..., N], argument)``; the activation's argument is empty unless kept."""
    check_inputs(x)
    rows = rows_of(x)
    (n_rows, n_in), n_out = rows.shape, len(weight)
    size = (*x.shape[:-1], n_out)
    check_operands(
        x, weight=(weight, (n_out, n_in)), bias=(bias, (n_out,)), residual=(residual, size)
    )
    out = torch.empty(size, dtype=x.dtype, device=x.device)
    argument = torch.empty(size if keep_argument else 0, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out, argument
    added = out.view(n_rows, n_out) if residual is None else rows_of(residual)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    tiles = _tiles(n_rows, n_out, x.dtype)
    launch(
        _product_kernel,
        (triton.cdiv(n_rows, tiles["BLOCK_M"]) * triton.cdiv(n_out, tiles["BLOCK_N"]),),
        rows,
        weight,
        bias.contiguous(),
        added,
        out,
        argument if keep_argument else out,
        rows.stride(0),
        weight.stride(0),
        added.stride(0),
        n_rows,
        n_in,
        n_out,
        FUNCTION="none" if activation is None else ACTIVATIONS[activation],
        KEEP_ARGUMENT=keep_argument,
        HAS_RESIDUAL=residual is not None,
        GROUP=_GROUP,
        **tiles,
    )
    return out, argument


def launch_slope(dout: Tensor, argument: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(dargument [..., N], dbias shares fp32 [programs, N])``."""
    rows, argument = rows_of(dout), argument.contiguous()
    n_rows, n_cols = rows.shape
    run = _run_of_rows(n_rows)
    n_programs = triton.cdiv(n_rows, run)
    dargument = torch.empty(argument.shape, dtype=argument.dtype, device=dout.device)
    shares = torch.empty(n_programs, n_cols, dtype=torch.float32, device=dout.device)
    if dout.numel():
        launch(
            _slope_kernel,
            (triton.cdiv(n_cols, _SLOPE_COLUMNS), n_programs),
            rows,
            argument,
            dargument,
            shares,
            rows.stride(0),
            n_rows,
            n_cols,
            run,
            FUNCTION=ACTIVATIONS[activation],
            BLOCK=_SLOPE_COLUMNS,
            num_warps=2,
        )
    return dargument, shares


@torch.library.custom_op("gptile::linear_activation", mutates_args=())
def _linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, keep_argument: bool
) -> tuple[Tensor, Tensor]:
    return launch_forward(x, weight, bias, activation, None, keep_argument)


@_linear_activation.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str, keep_argument: bool
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(*x.shape[:-1], len(weight))
    return out, torch.empty_like(out) if keep_argument else x.new_empty(0)


@torch.library.custom_op("gptile::activation_backward", mutates_args=())
def _activation_backward(dout: Tensor, argument: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return launch_slope(dout, argument, activation)


@_activation_backward.register_fake
def _(dout: Tensor, argument: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    n_rows = dout.numel() // dout.shape[-1]
    n_programs = -(-n_rows // _run_of_rows(n_rows))
    shares = dout.new_empty(n_programs, dout.shape[-1], dtype=torch.float32)
    return torch.empty_like(argument), shares


@torch.library.custom_op("gptile::linear_residual", mutates_args=())
def _linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return launch_forward(x, weight, bias, None, residual, False)[0]


@_linear_residual.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # or autograd makes zeros for the argument
    x, weight, _, ctx.activation, keep_argument = inputs
    if keep_argument:
        ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, weight, argument = ctx.saved_tensors
    gradient, shares = _activation_backward(dout, argument, ctx.activation)
    dbias = shares.sum(0).to(weight.dtype)
    return (*_products(ctx, gradient, x, weight), dbias, None, None)


def _save_residual(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _differentiate_residual(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dbias = dout.reshape(-1, dout.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
    return (*_products(ctx, dout, x, weight), dbias, dout)


def _products(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x and weight, by PyTorch, where they are wanted."""
    dx = gradient @ weight if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx, None
    return dx, gradient.reshape(-1, len(weight)).T @ x.reshape(-1, x.shape[-1])


_linear_activation.register_autograd(_differentiate, setup_context=_save)
_linear_residual.register_autograd(_differentiate_residual, setup_context=_save_residual)


def _differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _few(x: Tensor, *others: Tensor | None) -> bool:
    """Whether small_linear.py's kernels take this: few rows, nothing to differentiate."""
    return x.numel() <= MAX_ROWS * x.shape[-1] and not _differentiated(x, *others)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear_reference`; the vendor's product but for few rows."""
    if _few(x, weight, bias):
        return small_linear_triton(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_activation_triton(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """:func:`linear_activation_reference` in one kernel. Differentiable once, in reverse mode."""
    if _few(x, weight, bias):
        return small_linear_triton(x, weight, bias, activation=activation)
    keep_argument = _differentiated(x, weight, bias)
    return _linear_activation(x, weight, bias, activation, keep_argument)[0]


def linear_residual_triton(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """:func:`linear_residual_reference` in one kernel. Differentiable."""
    if _few(x, weight, bias, residual):
        return small_linear_triton(x, weight, bias, residual=residual)
    return _linear_residual(x, weight, bias, residual)


def layer_norm_linear_triton(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """:func:`layer_norm_linear_reference`, for few rows in one kernel. Differentiable once, in
    reverse mode.

    Raises:
        ValueError: for an activation without a bias.
    """
    if activation is not None and bias is None:
        raise ValueError("an activation comes with a bias")
    if _few(x, norm_weight, norm_bias, weight, bias):
        norm = (norm_weight, norm_bias, eps)
        return small_linear_triton(x, weight, bias, norm=norm, activation=activation)
    x = layer_norm_triton(x, norm_weight, norm_bias, eps)
    if activation is None or bias is None:
        return F.linear(x, weight, bias)
    return linear_activation_triton(x, weight, bias, activation)


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`linear_activation_reference` for a case with an activation, of
    :func:`linear_residual_reference` for another."""
    rows, n_in, n_out = shape["rows"], shape["in"], shape["out"]
    make = partial(example, dtype=dtype, device=device)
    # Weights of a size that keeps the product where an activation bends.
    given = {"x": make(rows, n_in), "weight": make(n_out, n_in) * n_in**-0.5, "bias": make(n_out)}
    if "activation" in shape:
        return {**given, "activation": shape["activation"]}
    return {**given, "residual": make(rows, n_out)}


def _launch_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    given = {"activation": None, "residual": None, **inputs(shape, dtype, device)}
    launch_forward(**given, keep_argument="activation" in shape)


def _launch_slope_case(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    argument = example(shape["rows"], shape["out"], dtype=dtype, device=device)
    launch_slope(torch.empty_like(argument), argument, shape.get("activation", "gelu_new"))


def _forward_work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, n_in, n_out = shape["rows"], shape["in"], shape["out"]
    tiles = _tiles(rows, n_out, dtype)
    down, across = triton.cdiv(rows, tiles["BLOCK_M"]), triton.cdiv(n_out, tiles["BLOCK_N"])
    loaded = rows * n_in * across + n_out * (n_in + 1) * down
    loaded += 0 if "activation" in shape else rows * n_out
    stored = rows * n_out * (2 if "activation" in shape else 1)
    distinct = rows * n_in + n_out * (n_in + 1) + stored
    distinct += 0 if "activation" in shape else rows * n_out
    loaded, stored, distinct = (n * dtype.itemsize for n in (loaded, stored, distinct))
    return Work(loaded, stored, distinct, 2 * rows * n_out * n_in)


def _slope_work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, outs = shape["rows"], shape["rows"] * shape["out"]
    shares = triton.cdiv(rows, _run_of_rows(rows)) * shape["out"]
    loaded, stored = 2 * outs * dtype.itemsize, outs * dtype.itemsize + 4 * shares
    return Work(loaded, stored, loaded + stored, 16 * outs)


PASSES = {
    "forward": Pass(_launch_case, _forward_work),
    "activation backward": Pass(_launch_slope_case, _slope_work),
}
