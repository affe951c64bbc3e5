"""Attention against the cache, with NaN in everything that must not be read."""

from collections.abc import Callable

import pytest
import torch

from gptile.kernels.attention import attention_reference
from gptile.kernels.decode_attention import decode_attention_reference
from gptile.kernels.kv_append import kv_append_reference, kv_append_triton

N_HEAD, HEAD_DIM, MAX_LEN = 2, 8, 24
BIAS = torch.linspace(-1, 1, 3 * N_HEAD * HEAD_DIM)


def packed(n_rows: int, n_tokens: int) -> torch.Tensor:
    return torch.randn(n_rows, n_tokens, 3 * N_HEAD * HEAD_DIM)


def views(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v with their bias, as attention without a cache takes them."""
    return (qkv + BIAS).unflatten(2, (3, N_HEAD, HEAD_DIM)).unbind(2)


def empty_cache(n_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (n_slots, N_HEAD, MAX_LEN, HEAD_DIM)
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


@pytest.mark.parametrize("append", [kv_append_reference, kv_append_triton])
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [13, 7], [19, 1], [5, 1, 14]])
def test_any_split_equals_attention_over_the_whole(pieces: list[int], append: Callable) -> None:
    qkv = packed(1, 20)
    whole = attention_reference(*views(qkv), 0.5)
    caches = empty_cache(1)
    outs, start = [], 0
    for piece in pieces:
        where = (torch.tensor([0]), torch.tensor([start]), torch.tensor([piece]))
        q = append(qkv[:, start : start + piece], BIAS, *caches, *where)
        outs.append(decode_attention_reference(q, *caches, *where, 0.5))
        start += piece
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    assert caches[0][0, :, 20:].isnan().all(), "written past the end"


@pytest.mark.parametrize("append", [kv_append_reference, kv_append_triton])
def test_ragged_rows_in_any_slots_are_as_if_alone(append: Callable) -> None:
    lengths, slots = [5, 1, 9], [3, 0, 2]
    histories = [packed(1, n) for n in lengths]
    new, counts = packed(3, 4), [4, 2, 1]
    caches = empty_cache(4)
    for history, slot in zip(histories, slots, strict=True):
        where = (torch.tensor([slot]), torch.tensor([0]), torch.tensor([history.shape[1]]))
        append(history, BIAS, *caches, *where)
    where = tuple(torch.tensor(x, dtype=torch.int32) for x in (slots, lengths, counts))
    q = append(new, BIAS, *caches, *where)
    out = decode_attention_reference(q, *caches, *where, 0.35)
    for row, count in enumerate(counts):
        alone = torch.cat([histories[row], new[row : row + 1, :count]], 1)
        expected = attention_reference(*views(alone), 0.35)[:, -count:]
        torch.testing.assert_close(out[row : row + 1, :count], expected)
        assert not out[row, count:].any(), "padding must come out as zero"
    assert caches[0][1].isnan().all(), "an unused slot was written"
    assert caches[0][0, :, 3:].isnan().all(), "padding was written"
