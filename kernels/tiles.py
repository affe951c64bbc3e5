"""What the kernels that multiply tiles share."""

from typing import Any

import torch

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import interpreting

MIN_DOT = 16
"""The least size of a tile that ``tl.dot`` takes."""


@triton.jit
def load_tile(
    ptr,  # first element
    row_stride,  # elements between rows
    rows,  # index of each tile row
    cols,  # index of each tile column
    n_rows,  # rows there are
    n_cols,  # columns there are
    FP32: tl.constexpr,  # convert to fp32
):
    """A tile ``[len(rows), len(cols)]`` of a matrix with unit column stride; 0 beyond its edges."""
    mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    tile = tl.load(ptr + rows[:, None] * row_stride + cols[None, :], mask=mask, other=0.0)
    return tile.to(tl.float32) if FP32 else tile


def block_of(size: int) -> int:
    """Power of two that holds ``size``, at least :data:`MIN_DOT`."""
    return max(MIN_DOT, triton.next_power_of_2(size))


def product_options(dtype: torch.dtype) -> dict[str, Any]:
    """How tiles of that dtype are multiplied.

    PRECISION: fp32 exactly ("ieee", where Triton's own default is tf32) unless PyTorch is set to
    multiply fp32 in tf32, on NVIDIA. FP32: the interpreter multiplies bf16 as integers, so there
    tiles become fp32 first.
    """
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32" and not torch.version.hip
    return {
        "PRECISION": "tf32" if allowed and dtype == torch.float32 else "ieee",
        "FP32": interpreting() and dtype == torch.bfloat16,
    }
