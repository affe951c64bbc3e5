"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405), the same bits in PyTorch and inside kernels.

Key, counter and float conversion are those of ``tl.rand(seed, position)``.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from gptile.kernels.jit import tl, triton

Words4: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
# The largest int32 times this stays below 1 after rounding to fp32.
_INT32_TO_UNIT = 4.6566127342e-10


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Philox4x32-10 on 32-bit words held in int64 tensors of one shape; four words out."""
    c0, c1, c2, c3 = counter
    multiplied, added = torch.stack([c0, c2]), torch.stack([c1, c3])
    per_word = (2,) + (1,) * c0.dim()
    multiplier = torch.tensor([_ROUND_A, _ROUND_B], device=c0.device).view(per_word)
    key_step = torch.tensor([_KEY_A, _KEY_B], device=c0.device).view(per_word)
    keys = torch.stack(key)
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps all 64 bits of the unsigned product.
        product = multiplied * multiplier
        high, low = (product >> 32) & _MASK32, product & _MASK32
        multiplied, added = high.flip(0) ^ added ^ keys, low.flip(0)
        keys = (keys + key_step) & _MASK32
    return multiplied[0], added[0], multiplied[1], added[1]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """``tl.rand(seed, position)``: fp32 in [0, 1), one per element of two int64 tensors."""
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK32, (positions >> 32) & _MASK32, zero, zero)
    word = philox4x32(counter, (seeds & _MASK32, (seeds >> 32) & _MASK32))[0]
    # Reinterpret as int32, then fold the negative half onto the positive one.
    word = torch.where(word >= 1 << 31, _MASK32 - word, word)
    return word.float() * _INT32_TO_UNIT


@triton.jit
def uniform_in_kernel(
    seed,  # int64
    position,  # int64
):
    """:func:`uniform` of two int64 scalars: what ``tl.rand`` is on a GPU; the interpreter's is in
    fp64."""
    word = tl.randint(seed, position).to(tl.int32, bitcast=True)
    return tl.where(word < 0, -word - 1, word).to(tl.float32) * 4.6566127342e-10
