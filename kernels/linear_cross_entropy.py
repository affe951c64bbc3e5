"""Cross-entropy of a linear head: ``-log softmax(x @ weight.T)[target]``.

The head of GPT-2 has 50257 columns, so its logits dwarf every other tensor of a training step. They
are never held together here (Wijmans et al. 2024, https://arxiv.org/abs/2411.09009): rows are taken
in chunks whose logits fit :data:`LOGITS_BUDGET`. The reference holds them all, in fp32.

Tiling. In each chunk the matrix product is PyTorch's: it is a large plain one, which the
vendor's library does better than a kernel of ours would. ``_loss_kernel`` then reads each row of
logits once, a program a row, block by block with an online maximum and sum in fp32;
``_gradient_kernel`` writes ``(softmax - onehot) * factor`` over the logits, a program a block of a
row; and PyTorch's products turn that into the chunk's ``dx`` and its share of ``dweight``, which is
added in fp32. The logits and their gradient are in the dtype of x, as in the reference. No atomics,
so the same input gives the same bits.

When the losses are summed, their gradient is known but for one number, so the forward pass computes
``dx`` and ``dweight`` too, and the backward pass multiplies them by it: logits are made once.
(Factor 1 also keeps ``softmax - onehot`` in the range of fp16, where 1/N would underflow; the sum
that ``dweight`` is may leave that range, so it stays fp32 until it is scaled.) Loss by loss, the
backward pass makes the logits again.

Rows of logits are padded to a multiple of 16 elements, because 50257 is odd: only then are they
aligned to the width of a vector load, in our kernels and in the library's. The kernels read and
write the padding too, for the same reason; what it holds counts for nothing, and the gradient's
is 0.

Bytes, for R rows of V logits of s bytes, padded to W, with targets of 8 bytes, in B blocks a row:
the loss loads ``R (W s + s + 8)`` and stores ``12 R``; the gradient loads ``R (W s + 20 B)`` and
stores ``R W s``. About 4 and 5 FLOPs a logit: memory bound. Each of the three products, with x of C
columns, is ``2 R V C`` FLOPs on ``(R C + V C + R V) s`` bytes: compute bound, and nearly all of the
FLOPs. Adding a chunk's fp32 share of ``dweight`` moves ``16 V C`` bytes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import Pass, Shape, Work, check_inputs, example, launch, rows_of

IGNORE_INDEX = -100
"""Targets with this value count for nothing (PyTorch's and Hugging Face's convention)."""
LOGITS_BUDGET = 256 * 2**20
"""Bytes of logits held at a time: thousands of rows of GPT-2's, so that the products stay large."""
_ALIGNMENT = 16
"""Elements; what Triton knows to be a multiple of 16 it loads as vectors."""
_MAX_BLOCK = 4096

CASES: dict[str, dict[str, int]] = {
    "gpt2-train": {"rows": 2048, "vocab": 50257, "cols": 768},
    "gpt2-xl-train": {"rows": 2048, "vocab": 50257, "cols": 1600},
    "demo-train": {"rows": 3072, "vocab": 2048, "cols": 256},
    "one row": {"rows": 1, "vocab": 50257, "cols": 768},
    "small vocabulary": {"rows": 5, "vocab": 7, "cols": 3},
    "one past a block": {"rows": 3, "vocab": 4097, "cols": 17},
}
"""Shapes by name: chunks that GPT-2 trains on, and ragged ones."""


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, not mean, sum or none")


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """Loss of predicting ``targets`` from ``x``.

    Args:
        x: ``[..., C]`` final hidden states.
        weight: ``[V, C]`` head.
        targets: ``[...]`` integers in ``[0, V)`` or :data:`IGNORE_INDEX`.
        reduction: ``"mean"`` over the targets that count (0 when none does), ``"sum"`` or
            ``"none"`` (0 where ignored).

    Returns:
        A scalar, or ``[...]`` for ``"none"``; fp32 (fp64 for fp64 inputs).
    """
    _check_reduction(reduction)
    logits = F.linear(x, weight)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none" if reduction == "none" else "sum",
    )
    if reduction == "none":
        return loss.view(targets.shape)
    if reduction == "mean":
        return loss / (targets != IGNORE_INDEX).sum().clamp(min=1)
    return loss


@triton.jit
def _loss_kernel(
    logits_ptr,  # [n_rows, n_cols], padded to row_stride
    targets_ptr,  # column of each row's target, or IGNORE, [n_rows]
    loss_ptr,  # fp32, 0 where ignored, [n_rows]
    maximum_ptr,  # fp32 largest logit of each row, [n_rows]
    total_ptr,  # fp32 sum of exp(logit - maximum) of each row, [n_rows]
    row_stride,  # elements between rows of logits, padding included
    n_cols,  # size of the vocabulary
    IGNORE: tl.constexpr,  # target that counts for nothing
    BLOCK: tl.constexpr,  # logits read at a time
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    maximum = -3.4028234663852886e38  # the least: -inf would be subtracted from itself
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + cols, mask=cols < row_stride).to(tl.float32)
        logits = tl.where(cols < n_cols, logits, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(logits - new_maximum), axis=0)
        maximum = new_maximum
    target = tl.load(targets_ptr + row)
    inside = (target >= 0) & (target < n_cols)
    # A target out of range is not looked up, and its loss is NaN.
    logit = tl.load(logits_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
    loss = tl.log(total) + (maximum - logit)
    tl.store(loss_ptr + row, tl.where(target == IGNORE, 0.0, loss))
    # Two numbers: their log-sum-exp in one would lose, beside a large maximum, the digits of total.
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # [n_rows, n_cols], padded to row_stride; overwritten with their gradient
    targets_ptr,  # column of each row's target, or IGNORE, [n_rows]
    maximum_ptr,  # of the loss kernel, [n_rows]
    total_ptr,  # of the loss kernel, [n_rows]
    factor_ptr,  # fp32 gradient of each row's loss, [n_rows]
    row_stride,  # elements between rows of logits, padding included
    n_cols,  # size of the vocabulary
    IGNORE: tl.constexpr,  # target that counts for nothing
    BLOCK: tl.constexpr,  # logits a program owns
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < row_stride
    target = tl.load(targets_ptr + row)
    maximum = tl.load(maximum_ptr + row)
    total = tl.load(total_ptr + row)
    factor = tl.load(factor_ptr + row)
    logits_ptr += row * row_stride
    logits = tl.load(logits_ptr + cols, mask=mask, other=-float("inf")).to(tl.float32)
    gradient = (tl.exp(logits - maximum) / total - tl.where(cols == target, 1.0, 0.0)) * factor
    # Also where the logits are NaN, and in the padding: PyTorch's bf16 product on a CPU was seen to
    # read it.
    gradient = tl.where((target == IGNORE) | (cols >= n_cols), 0.0, gradient)
    tl.store(logits_ptr + cols, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


def _padded(n_cols: int) -> int:
    return triton.cdiv(n_cols, _ALIGNMENT) * _ALIGNMENT


def _block(n_cols: int) -> dict[str, int]:
    """At most 16 logits a thread, so that a long row needs no more registers than a short one."""
    block = min(_MAX_BLOCK, triton.next_power_of_2(_padded(n_cols)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def launch_loss(
    logits: Tensor, targets: Tensor, loss: Tensor, maximum: Tensor, total: Tensor
) -> None:
    """Fill the last three, fp32 ``[R]``, from ``logits [R, V]`` whose padding is theirs."""
    n_rows, n_cols = logits.shape
    launch(
        _loss_kernel,
        (n_rows,),
        logits,
        targets,
        loss,
        maximum,
        total,
        logits.stride(0),
        n_cols,
        IGNORE=IGNORE_INDEX,
        **_block(n_cols),
    )


def launch_gradient(
    logits: Tensor, targets: Tensor, maximum: Tensor, total: Tensor, factor: Tensor
) -> None:
    """Overwrite ``logits [R, V]`` with the gradient of ``(loss * factor).sum()``."""
    n_rows, n_cols = logits.shape
    options = _block(n_cols)
    launch(
        _gradient_kernel,
        (n_rows, triton.cdiv(n_cols, options["BLOCK"])),
        logits,
        targets,
        maximum,
        total,
        factor,
        logits.stride(0),
        n_cols,
        IGNORE=IGNORE_INDEX,
        **options,
    )


def rows_per_chunk(n_rows: int, n_cols: int, dtype: torch.dtype) -> int:
    """As many as the budget holds, in whole tiles of a matrix product, and at least one."""
    rows = LOGITS_BUDGET // (_padded(n_cols) * dtype.itemsize)
    if rows > 128:
        rows -= rows % 128
    return max(1, min(n_rows, rows))


def _product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` without rounding the sum to 16 bits: it may leave the range of fp16."""
    if a.is_cuda and not torch.version.hip and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def launch_chunks(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    need_dx: bool,
    need_dweight: bool,
    factor: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The one loop over chunks, of both directions.

    Args:
        need_dx, need_dweight: whether to compute these.
        factor: gradient of each row's loss, fp32 ``[R]``; where either is needed.
        statistics: those of an earlier call, or None to find them, and the losses, in this one.

    Returns:
        ``(loss, statistics, dx, dweight)``: ``[R]``; the maximum and the total of each row,
        ``[2, R]``; like x; like weight. All but dx are fp32. What is not needed is empty.

    Raises:
        ValueError: for shapes that do not match.
        TypeError: for dtypes or devices the kernels do not take.
    """
    check_inputs(x, weight, indices=(targets,))
    if x.dtype != weight.dtype or targets.is_floating_point():
        raise TypeError(
            f"x and weight need one dtype and targets integers, not {x.dtype}, {weight.dtype} and "
            f"{targets.dtype}"
        )
    if (targets.shape, weight.shape[1:]) != (x.shape[:-1], x.shape[-1:]):
        shapes = ", ".join(str(list(t.shape)) for t in (x, weight, targets))
        raise ValueError(f"x [..., C], weight [V, C] and targets [...] do not match: {shapes}")
    rows, targets = rows_of(x), targets.reshape(-1).contiguous()
    n_rows, n_cols = rows.shape[0], weight.shape[0]
    step = rows_per_chunk(n_rows, n_cols, x.dtype)
    buffer = x.new_empty(step, _padded(n_cols))
    known = statistics is not None
    loss = x.new_empty(0 if known else n_rows, dtype=torch.float32)
    if statistics is None:
        statistics = x.new_empty(2, n_rows, dtype=torch.float32)
    maximum, total = statistics
    dx = x.new_empty(rows.shape if need_dx else 0)
    dweight = x.new_zeros(weight.shape if need_dweight else 0, dtype=torch.float32)
    for start in range(0, n_rows, step):
        chunk = slice(start, min(start + step, n_rows))
        logits = buffer[: chunk.stop - start, :n_cols]
        torch.mm(rows[chunk], weight.T, out=logits)
        if not known:
            launch_loss(logits, targets[chunk], loss[chunk], maximum[chunk], total[chunk])
        if factor is not None:
            launch_gradient(logits, targets[chunk], maximum[chunk], total[chunk], factor[chunk])
        if need_dx:
            torch.mm(logits, weight, out=dx[chunk])
        if need_dweight:
            dweight += _product_in_fp32(logits.T, rows[chunk])
    return loss, statistics, dx.view(x.shape) if need_dx else dx, dweight


@torch.library.custom_op("gptile::linear_cross_entropy_sum", mutates_args=())
def _sum(
    x: Tensor, weight: Tensor, targets: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    factor = None
    if need_dx or need_dweight:
        factor = x.new_ones(targets.numel(), dtype=torch.float32)
    loss, _, dx, dweight = launch_chunks(x, weight, targets, need_dx, need_dweight, factor)
    return loss.sum(), dx, dweight


@_sum.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape if need_dx else 0)
    dweight = x.new_empty(weight.shape if need_dweight else 0, dtype=torch.float32)
    return x.new_empty((), dtype=torch.float32), dx, dweight


@torch.library.custom_op("gptile::linear_cross_entropy_sum_backward", mutates_args=())
def _sum_backward(dloss: Tensor, dx: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor]:
    # One dimension, or PyTorch would round dloss, a loss scale perhaps, to the dtype of dx first.
    factor = dloss.reshape(1)
    scaled = dx.new_empty(dweight.shape)
    return torch.mul(dx, factor, out=torch.empty_like(dx)), torch.mul(dweight, factor, out=scaled)


@_sum_backward.register_fake
def _(dloss: Tensor, dx: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dx), torch.empty_like(dweight, dtype=dx.dtype)


@torch.library.custom_op("gptile::linear_cross_entropy_rows", mutates_args=())
def _rows(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return launch_chunks(x, weight, targets, False, False)[:2]


@_rows.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = x.new_empty(targets.numel(), dtype=torch.float32)
    return loss, loss.new_empty(2, targets.numel())


@torch.library.custom_op("gptile::linear_cross_entropy_rows_backward", mutates_args=())
def _rows_backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    *_, dx, dweight = launch_chunks(
        x, weight, targets, need_dx, need_dweight, dloss.contiguous(), statistics
    )
    return dx, dweight.to(weight.dtype)


@_rows_backward.register_fake
def _(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if need_dx else 0)
    return dx, x.new_empty(weight.shape if need_dweight else 0)


def _save_gradients(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # or autograd makes zeros for dx and dweight
    ctx.save_for_backward(*output[1:])


def _differentiate_sum(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight = _sum_backward(dloss, *ctx.saved_tensors)
    need_dx, need_dweight, *_ = ctx.needs_input_grad
    return dx if need_dx else None, dweight if need_dweight else None, None, None, None


def _save_statistics(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate_rows(ctx: Any, dloss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    need_dx, need_dweight, _ = ctx.needs_input_grad
    dx, dweight = _rows_backward(dloss, *ctx.saved_tensors, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None


_sum.register_autograd(_differentiate_sum, setup_context=_save_gradients)
_rows.register_autograd(_differentiate_rows, setup_context=_save_statistics)


def linear_cross_entropy_triton(
    x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """:func:`linear_cross_entropy_reference` without ever holding the logits. Differentiable once.

    A target out of range makes the loss NaN. Where a target is ignored, x changes no loss and its
    gradient is 0, even if it is NaN; but dweight is then NaN, as 0 * NaN is (in the reference too).
    """
    _check_reduction(reduction)
    if reduction == "none":
        return _rows(x, weight, targets)[0].view(targets.shape)
    recorded = torch.is_grad_enabled()
    needs = (recorded and x.requires_grad, recorded and weight.requires_grad)
    loss, _, _ = _sum(x, weight, targets, *needs)
    if reduction == "mean":
        return loss / (targets != IGNORE_INDEX).sum().clamp(min=1)
    return loss


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`linear_cross_entropy_reference` for a case."""
    rows, vocab, cols = shape["rows"], shape["vocab"], shape["cols"]
    weight = example(vocab, cols, dtype=dtype, device=device) * cols**-0.5
    targets = torch.arange(rows, device=device) % vocab
    return {
        "x": example(rows, cols, dtype=dtype, device=device),
        "weight": weight,
        "targets": targets,
    }


def _logits(shape: Shape, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Padded logits, targets, and three fp32 vectors."""
    rows, vocab = shape["rows"], shape["vocab"]
    logits = example(rows, _padded(vocab), dtype=dtype, device=device)[:, :vocab]
    vectors = [example(rows, dtype=torch.float32, device=device) for _ in range(3)]
    return logits, torch.arange(rows, device=device) % vocab, vectors


def _launch_loss(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    logits, targets, vectors = _logits(shape, dtype, device)
    launch_loss(logits, targets, *vectors)


def _launch_gradient(shape: Shape, dtype: torch.dtype, device: Any) -> None:
    logits, targets, vectors = _logits(shape, dtype, device)
    launch_gradient(logits, targets, *vectors)


def _loss_work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, vocab = shape["rows"], shape["vocab"]
    loaded = rows * ((_padded(vocab) + 1) * dtype.itemsize + 8)
    stored = 3 * 4 * rows
    distinct = rows * (_padded(vocab) * dtype.itemsize + 8) + stored
    return Work(loaded, stored, distinct, 4 * rows * vocab)


def _gradient_work(shape: Shape, dtype: torch.dtype) -> Work:
    rows, vocab = shape["rows"], shape["vocab"]
    logits = rows * _padded(vocab) * dtype.itemsize
    blocks = triton.cdiv(vocab, _block(vocab)["BLOCK"])
    of_a_row = 8 + 3 * 4
    loaded, distinct = logits + rows * blocks * of_a_row, 2 * logits + rows * of_a_row
    return Work(loaded, logits, distinct, 5 * rows * vocab)


PASSES = {
    "loss": Pass(_launch_loss, _loss_work),
    "gradient": Pass(_launch_gradient, _gradient_work),
}
