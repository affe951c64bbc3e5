"""Token and position embedding, summed, with dropout.

``out[b, t] = dropout(wte[ids[b, t]] + wpe[positions[b, t]])``, as the input of GPT-2 (Radford et
al. 2019). The sum and the dropout are taken in fp32 and rounded once. An element survives with
probability ``1 - p`` and is then scaled by ``1 / (1 - p)`` (Srivastava et al. 2014,
https://jmlr.org/papers/v15/srivastava14a.html). Which ones do is a function of one seed and the
element's place alone: a word of Philox4x32-10 (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405), whose four words serve four neighbouring columns. So the
backward pass computes the mask again and nothing is stored.

Tiling. Forward, a program owns COLUMNS columns of one token. Backward, the rows of the gradient are
put in the order of what they looked up (a stable sort), and a program owns COLUMNS columns of one
row of a table: it adds the run of gradient rows that looked it up, ROWS at a time and in order, or
stores zeros where none did. No atomics, so the same input gives the same bits.

Bytes, for R = B * T tokens of C columns of s bytes, N columns' blocks, int64 indices: forward loads
``2 R C s + 16 N R`` and stores ``R C s``; backward, for both tables of V and P rows, loads
``2 R C s + 16 N (R + V + P)`` (the gradient twice; its order; the bounds of the runs) and stores
``(V + P) C s``. Dropout adds the seed, 8 bytes a program. One or two FLOPs an element of each
tensor: memory bound.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import Pass, Shape, Work, check_inputs, example, launch, rows_of

# Gradient rows in flight for a table row that was looked up often; most rows never were.
_ROWS = 4

CASES: dict[str, dict[str, int]] = {
    "gpt2-decode": {"rows": 1, "tokens": 1, "cols": 768, "vocab": 50257},
    "gpt2-train": {"rows": 8, "tokens": 1024, "cols": 768, "vocab": 50257},
    "gpt2-xl-prefill": {"rows": 1, "tokens": 1024, "cols": 1600, "vocab": 50257},
    "demo-train": {"rows": 12, "tokens": 256, "cols": 256, "vocab": 2048},
    "one column": {"rows": 2, "tokens": 9, "cols": 1, "vocab": 5},
    "one past a block": {"rows": 3, "tokens": 5, "cols": 257, "vocab": 7},
}
"""Shapes by name: what GPT-2 launches, and ragged ones. There are as many positions as tokens."""


def columns_per_program(n_cols: int) -> int:
    """A power of two: all columns of a row up to 1024, and no fewer than one warp is worth."""
    return min(1024, max(256, triton.next_power_of_2(n_cols)))


def embedding_reference(
    ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor, dropout_p: float = 0.0
) -> Tensor:
    """Look up and add both embeddings, then drop.

    Args:
        ids: ``[B, T]`` int32 or int64 token ids, each in ``[0, V)``.
        positions: ``[T]`` or ``[B, T]`` int32 or int64, each in ``[0, n_positions)``.
        wte: ``[V, C]`` token embedding.
        wpe: ``[n_positions, C]`` position embedding.
        dropout_p: probability of dropping an element (0 outside training).

    Returns:
        ``[B, T, C]`` in the dtype of the weights.
    """
    return F.dropout(F.embedding(ids, wte) + F.embedding(positions, wpe), dropout_p)


@triton.jit
def _drop(
    x,  # fp32, [..., columns]
    seed,  # of all elements
    counters,  # one for 4 neighbouring columns, int64 [..., columns / 4]
    threshold,  # what of 2^31 is dropped
    scale,  # factor on what is kept
):
    first, second, third, fourth = tl.randint4x(seed, counters)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    return tl.where((words & 0x7FFFFFFF) >= threshold, x * scale, 0.0)


@triton.jit
def _forward_kernel(
    ids_ptr,  # token of each row of out, [n_rows]
    positions_ptr,  # position of each, [n_positions]: n_rows, or those of one sequence for all
    wte_ptr,  # [V, n_cols]
    wpe_ptr,  # [P, n_cols]
    seed_ptr,  # of the dropout, int64 [1]; unused without DROPOUT
    out_ptr,  # [n_rows, n_cols] contiguous
    wte_row_stride,  # elements between rows of wte
    wpe_row_stride,  # elements between rows of wpe
    n_vocab,  # V
    table_length,  # P
    n_positions,  # positions given
    n_cols,  # C
    threshold,  # what of 2^31 is dropped
    scale,  # factor on what is kept
    DROPOUT: tl.constexpr,  # drop
    COLUMNS: tl.constexpr,  # columns a program owns
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = cols < n_cols
    token = tl.load(ids_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row % n_positions).to(tl.int64)
    # What lies outside a table is not looked up, and gives NaN.
    there = mask & (token >= 0) & (token < n_vocab)
    wte = tl.load(wte_ptr + token * wte_row_stride + cols, mask=there, other=float("nan"))
    there = mask & (position >= 0) & (position < table_length)
    wpe = tl.load(wpe_ptr + position * wpe_row_stride + cols, mask=there, other=float("nan"))
    out = wte.to(tl.float32) + wpe.to(tl.float32)
    if DROPOUT:
        fours = tl.program_id(1) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        counters = row * tl.cdiv(n_cols, 4) + fours
        out = _drop(out, tl.load(seed_ptr), counters, threshold, scale)
    tl.store(out_ptr + row * n_cols + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dout_ptr,  # gradient of the output, [n_rows, n_cols]
    order_ptr,  # its rows in the order of what they looked up, int64 [n_rows]
    bounds_ptr,  # where in order each table row's run begins, and the end, int64 [V + 1]
    seed_ptr,  # of the dropout, int64 [1]; unused without DROPOUT
    dtable_ptr,  # gradient of the table, [V, n_cols] contiguous
    dout_row_stride,  # elements between rows of dout
    n_cols,  # C
    threshold,  # what of 2^31 was dropped
    scale,  # factor on what was kept
    DROPOUT: tl.constexpr,  # the forward pass dropped
    ROWS: tl.constexpr,  # gradient rows added at a time
    COLUMNS: tl.constexpr,  # columns a program owns
):
    entry = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    fours = tl.program_id(1) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    begin, end = tl.load(bounds_ptr + entry), tl.load(bounds_ptr + entry + 1)
    dout_ptr += cols[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DROPOUT:
        seed = tl.load(seed_ptr)
    for start in range(begin, end, ROWS):
        places = start + tl.arange(0, ROWS)
        rows = tl.load(order_ptr + places, mask=places < end, other=0)[:, None]
        mask = (places < end)[:, None] & (cols < n_cols)[None, :]
        dout = tl.load(dout_ptr + rows * dout_row_stride, mask=mask, other=0.0).to(tl.float32)
        if DROPOUT:
            counters = rows * tl.cdiv(n_cols, 4) + fours[None, :]
            dout = _drop(dout, seed, counters, threshold, scale)
        total += dout
    dtable = tl.sum(total, axis=0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + entry * n_cols + cols, dtable, mask=cols < n_cols)


def _dropout_options(dropout_p: float) -> dict[str, Any]:
    """How kernels drop: exact to 2^-32 in the probability."""
    scale = 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)
    return {"threshold": round(dropout_p * 2**31), "scale": scale, "DROPOUT": dropout_p > 0}


def launch_forward(
    ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """:func:`embedding_reference` in one kernel; ``seed`` is int64 ``[1]``, None without dropout.

    Raises:
        ValueError: for shapes that do not fit, or a dropout that is not a probability.
        TypeError: for indices that are not int32 or int64.
    """
    check_inputs(wte, wpe, indices=(ids, positions))
    for name, index in (("ids", ids), ("positions", positions)):
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {index.dtype}")
    if positions.shape not in (ids.shape, ids.shape[1:]):
        raise ValueError(f"no positions {list(positions.shape)} for ids {list(ids.shape)}")
    if wte.shape[1] != wpe.shape[1] or wte.dtype != wpe.dtype:
        raise ValueError("the two tables must have the same width and dtype")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"a dropout of {dropout_p} is no probability")
    n_cols = wte.shape[1]
    columns = columns_per_program(n_cols)
    wte_rows, wpe_rows = rows_of(wte), rows_of(wpe)
    out = torch.empty(*ids.shape, n_cols, dtype=wte.dtype, device=wte.device)
    if out.numel():
        launch(
            _forward_kernel,
            (ids.numel(), triton.cdiv(n_cols, columns)),
            ids.contiguous(),
            positions.contiguous(),
            wte_rows,
            wpe_rows,
            ids if seed is None else seed,
            out,
            wte_rows.stride(0),
            wpe_rows.stride(0),
            len(wte),
            len(wpe),
            positions.numel(),
            n_cols,
            **_dropout_options(dropout_p),
            COLUMNS=columns,
            num_warps=columns // 256,  # 8 elements a thread
        )
    return out


def _gradient(
    dout: Tensor, index: Tensor, n_entries: int, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """``[n_entries, C]``: of each table row, the sum of ``dout [R, C]`` where ``index [R]`` is
    it."""
    ordered, order = torch.sort(index, stable=True)
    entries = torch.arange(n_entries + 1, dtype=index.dtype, device=index.device)
    bounds = torch.searchsorted(ordered, entries)
    n_cols = dout.shape[1]
    columns = columns_per_program(n_cols)
    dtable = torch.empty(n_entries, n_cols, dtype=dout.dtype, device=dout.device)
    launch(
        _backward_kernel,
        (n_entries, triton.cdiv(n_cols, columns)),
        dout,
        order,
        bounds,
        order if seed is None else seed,
        dtable,
        dout.stride(0),
        n_cols,
        **_dropout_options(dropout_p),
        ROWS=_ROWS,
        COLUMNS=columns,
        num_warps=_ROWS * columns // 512,  # 16 sums a thread: with the mask, twice that spills
    )
    return dtable


def launch_backward(
    dout: Tensor,
    ids: Tensor,
    positions: Tensor,
    n_vocab: int,
    n_positions: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(dwte, dwpe)``; of no rows where ``n_vocab`` or ``n_positions`` is 0."""
    rows = rows_of(dout)
    tables = ((ids, n_vocab), (positions.expand(ids.shape), n_positions))
    dwte, dwpe = (
        _gradient(rows, index.reshape(-1), size, dropout_p, seed)
        if size
        else dout.new_empty(0, dout.shape[-1])
        for index, size in tables
    )
    return dwte, dwpe


@torch.library.custom_op("gptile::embedding", mutates_args=())
def _embedding(
    ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor, dropout_p: float, seed: Tensor | None
) -> Tensor:
    return launch_forward(ids, positions, wte, wpe, dropout_p, seed)


@_embedding.register_fake
def _(
    ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor, dropout_p: float, seed: Tensor | None
) -> Tensor:
    return wte.new_empty(*ids.shape, wte.shape[1])


@torch.library.custom_op("gptile::embedding_backward", mutates_args=())
def _embedding_backward(
    dout: Tensor,
    ids: Tensor,
    positions: Tensor,
    n_vocab: int,
    n_positions: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return launch_backward(dout, ids, positions, n_vocab, n_positions, dropout_p, seed)


@_embedding_backward.register_fake
def _(
    dout: Tensor,
    ids: Tensor,
    positions: Tensor,
    n_vocab: int,
    n_positions: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return dout.new_empty(n_vocab, dout.shape[2]), dout.new_empty(n_positions, dout.shape[2])


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ids, positions, wte, wpe, ctx.dropout_p, seed = inputs
    ctx.sizes = wte.shape[0], wpe.shape[0]
    ctx.save_for_backward(ids, positions, seed)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    ids, positions, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad[2:4]
    sizes = (size if need else 0 for size, need in zip(ctx.sizes, needs, strict=True))
    gradients = _embedding_backward(dout, ids, positions, *sizes, ctx.dropout_p, seed)
    dwte, dwpe = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return None, None, dwte, dwpe, None, None


_embedding.register_autograd(_differentiate, setup_context=_save)


def embedding_triton(
    ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor, dropout_p: float = 0.0
) -> Tensor:
    """:func:`embedding_reference` in one kernel. Differentiable once.

    The dropout's seed comes from PyTorch's generator on the device, so ``torch.manual_seed``
    reproduces the mask; it is not the mask that PyTorch's dropout would draw. An id or a position
    outside its table gives NaN.
    """
    seed = torch.randint(2**63 - 1, (1,), device=ids.device) if dropout_p else None
    return _embedding(ids, positions, wte, wpe, dropout_p, seed)


def _example_indices(shape: Shape, device: Any) -> tuple[Tensor, Tensor]:
    rows, tokens = shape["rows"], shape["tokens"]
    ids = torch.arange(rows * tokens, device=device).view(rows, tokens) % shape["vocab"]
    return ids, torch.arange(tokens, device=device)


def _example_seed(device: Any, p: float) -> Tensor | None:
    return torch.zeros(1, dtype=torch.int64, device=device) if p else None


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """The arguments of :func:`embedding_reference` for a case, without dropout."""
    ids, positions = _example_indices(shape, device)
    wte, wpe = (
        example(shape[size], shape["cols"], dtype=dtype, device=device)
        for size in ("vocab", "tokens")
    )
    return {"ids": ids, "positions": positions, "wte": wte, "wpe": wpe}


def _launch_forward(shape: Shape, dtype: torch.dtype, device: Any, *, p: float) -> None:
    launch_forward(**inputs(shape, dtype, device), dropout_p=p, seed=_example_seed(device, p))


def _launch_backward(shape: Shape, dtype: torch.dtype, device: Any, *, p: float) -> None:
    rows, tokens, cols, vocab = shape.values()
    dout = example(rows, tokens, cols, dtype=dtype, device=device)
    indices = _example_indices(shape, device)
    launch_backward(dout, *indices, vocab, tokens, p, _example_seed(device, p))


def _forward_work(shape: Shape, dtype: torch.dtype, *, p: float) -> Work:
    rows = shape["rows"] * shape["tokens"]
    cols = shape["cols"]
    elements, programs = rows * cols, rows * -(-cols // columns_per_program(cols))
    loaded = 2 * elements * dtype.itemsize + programs * (24 if p else 16)
    stored = elements * dtype.itemsize
    looked_up = (min(rows, shape["vocab"]) + shape["tokens"]) * cols * dtype.itemsize
    distinct = looked_up + 8 * (rows + shape["tokens"]) + (8 if p else 0) + stored
    return Work(loaded, stored, distinct, (2 if p else 1) * elements)


def _backward_work(shape: Shape, dtype: torch.dtype, *, p: float) -> Work:
    rows, tokens, cols, vocab = shape.values()
    blocks, entries = -(-cols // columns_per_program(cols)), vocab + tokens
    orders, bounds = 2 * 8 * rows * tokens, (24 if p else 16) * entries
    elements = 2 * rows * tokens * cols
    loaded = elements * dtype.itemsize + blocks * (orders + bounds)
    stored = entries * cols * dtype.itemsize
    distinct = elements * dtype.itemsize + orders + 8 * (entries + 2) + (16 if p else 0) + stored
    return Work(loaded, stored, distinct, (2 if p else 1) * elements)


PASSES = {
    f"{name}{' dropout' if p else ''}": Pass(partial(run, p=p), partial(work, p=p))
    for p in (0.0, 0.1)
    for name, run, work in (
        ("forward", _launch_forward, _forward_work),
        ("backward", _launch_backward, _backward_work),
    )
}
