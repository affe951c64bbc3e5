"""The reference and the kernel that fill the cache, against the formula in fp64: values, roundings,
layouts, everything that must stay untouched, and proof that wrong kernels are seen."""

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gptile.kernels import kv_append as kernels
from gptile.kernels.kv_append import CASES, kv_append_reference, kv_append_triton

FUNCTIONS = [kv_append_reference, kv_append_triton]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(
    rows: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Projection and bias, of means that are not 0."""
    width = 3 * heads * head_dim
    return (torch.randn(rows, tokens, width) * 1.5 + 0.3).to(dtype), torch.randn(width).to(dtype)


def cache_of(
    slots: int, heads: int, max_len: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """K and V of three layers, ``[2, 3, slots, heads, max_len, head_dim]``, NaN everywhere."""
    return torch.full((2, 3, slots, heads, max_len, head_dim), torch.nan, dtype=dtype)


def where(slots: list[int], starts: list[int], counts: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (slots, starts, counts))


def expect(qkv: Tensor, bias: Tensor, cache: Tensor, at: tuple[Tensor, ...]) -> tuple:
    """``(q, cache)`` in fp64 after writing into the middle layer, token by token."""
    _, _, _, heads, max_len, head_dim = cache.shape
    parts = (qkv.double() + bias.double()).unflatten(2, (3, heads, head_dim))
    cache = cache.double()
    for row, (slot, start, count) in enumerate(zip(*(x.tolist() for x in at), strict=True)):
        for token in range(count):
            if 0 <= start + token < max_len:
                cache[:, 1, slot, :, start + token] = parts[row, token, 1:]
    return parts[:, :, 0], cache


def rounded(got: Tensor, exact: Tensor, *, truncates: bool) -> bool:
    """Whether every element is the nearest of its dtype (the fp32 sum in between may move a tie),
    and NaN exactly where it should be. ``truncates``: to bf16 the next towards 0 will do."""
    info = torch.finfo(got.dtype)
    ulp = 1.0 if truncates and got.dtype == torch.bfloat16 else 0.5
    allowed = exact.abs() * (ulp * info.eps + 2**-24) + info.smallest_normal * info.eps
    close = (got.double() - exact).abs() <= allowed
    return got.shape == exact.shape and bool((close | (got.isnan() & exact.isnan())).all())


def wrong(
    function: Callable, qkv: Tensor, bias: Tensor, cache: Tensor, at: tuple[Tensor, ...]
) -> list[str]:
    """What differs from fp64 by more than one rounding, or was written and should not have been."""
    exact_q, exact_cache = expect(qkv, bias, cache, at)
    written = cache.clone()
    q = function(qkv, bias, written[0, 1], written[1, 1], *at)
    # Triton's interpreter rounds to bf16 towards 0; a GPU, as PyTorch, to the nearest.
    truncates = function is not kv_append_reference
    pairs = {
        "q": (q, exact_q),
        "k": (written[0], exact_cache[0]),
        "v": (written[1], exact_cache[1]),
    }
    right = {name for name, pair in pairs.items() if rounded(*pair, truncates=truncates)}
    return sorted(pairs.keys() - right) + (["dtype of q"] if q.dtype != qkv.dtype else [])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_rounded_once(
    case: str, dtype: torch.dtype, cache_dtype: torch.dtype, function: Callable
) -> None:
    rows, tokens, heads, head_dim, max_len = CASES[case].values()
    rows, tokens, max_len = min(rows, 3), min(tokens, 6), min(max_len, 9)
    qkv, bias = inputs(rows, tokens, heads, head_dim, dtype)
    cache = cache_of(rows, heads, max_len, head_dim, cache_dtype)
    at = where([*range(rows)], [max_len - tokens] * rows, [tokens] * rows)
    assert wrong(function, qkv, bias, cache, at) == []


# Rows of 0, 1, some and all of 4 tokens, in slots out of order; padding that reaches past the end.
RAGGED = where([4, 0, 3, 1], [2, 6, 1, 3], [0, 1, 3, 4])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_rows_write_their_own_tokens_only(dtype: torch.dtype, function: Callable) -> None:
    at = tuple(x.to(dtype) for x in RAGGED)
    assert wrong(function, *inputs(4, 4, 3, 8), cache_of(5, 3, 7, 8), at) == []


def test_padding_gets_the_same_q_from_both() -> None:
    qkv, bias = inputs(4, 4, 3, 8)
    both = [function(qkv, bias, *cache_of(5, 3, 7, 8)[:, 1], *RAGGED) for function in FUNCTIONS]
    assert torch.equal(*both)


@pytest.mark.parametrize("start", [-(2**31), -9, -1, 5, 6, 7, 8, 500, 2**31 - 3])
def test_a_wrong_start_never_writes_outside_its_slot(start: int) -> None:
    """What lies before position 0 or past the end is dropped; the reference would refuse it."""
    at = where([1], [start], [3])
    assert wrong(kv_append_triton, *inputs(1, 3, 2, 8), cache_of(3, 2, 7, 8), at) == []


def test_a_wrong_count_writes_no_more_than_there_are_tokens() -> None:
    qkv, bias = inputs(2, 3, 2, 8)
    cache, same = cache_of(2, 2, 7, 8), cache_of(2, 2, 7, 8)
    kv_append_triton(qkv, bias, *cache[:, 1], *where([0, 1], [0, 0], [100, -1]))
    kv_append_triton(qkv, bias, *same[:, 1], *where([0, 1], [0, 0], [3, 0]))
    assert torch.equal(cache.nan_to_num(7), same.nan_to_num(7))


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 513])
def test_widths_around_block_edges(columns: int) -> None:
    at = where([1, 0], [2, 0], [1, 2])
    for heads, head_dim in ((1, columns), (columns, 1)):
        arguments = (*inputs(2, 2, heads, head_dim), cache_of(2, heads, 3, head_dim), at)
        assert wrong(kv_append_triton, *arguments) == []


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "column-strided": lambda t: torch.stack([t, t * torch.nan], -1)[..., 0],
    "a slice of more": lambda t: torch.cat([t * torch.nan, t, t * torch.nan], 2).chunk(3, 2)[1],
    "one row for all": lambda t: t[:1].expand_as(t),
    "one token for all": lambda t: t[:, :1].expand_as(t),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_projection(layout: str, function: Callable) -> None:
    qkv, bias = inputs(4, 4, 3, 8)
    bias = torch.stack([bias, bias * torch.nan], -1)[:, 0]
    at = tuple(torch.stack([x, x + 1], -1)[:, 0] for x in RAGGED)
    assert wrong(function, LAYOUTS[layout](qkv), bias, cache_of(5, 3, 7, 8), at) == []


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_layouts_of_the_cache(order: tuple[int, ...], function: Callable) -> None:
    """Slots, heads and positions in any order of memory."""
    qkv, bias = inputs(4, 4, 3, 8)
    back = [order.index(axis) for axis in range(3)]

    def reordered(*arguments: Tensor) -> Tensor:
        qkv, bias, k_cache, v_cache, *at = arguments
        caches = [x.permute(*order, 3).contiguous().permute(*back, 3) for x in (k_cache, v_cache)]
        q = function(qkv, bias, *caches, *at)
        k_cache.copy_(caches[0])
        v_cache.copy_(caches[1])
        return q

    assert wrong(reordered, qkv, bias, cache_of(5, 3, 7, 8), RAGGED) == []


def far_apart(sizes: tuple[int, ...], axis: int) -> Tensor:
    """Two fp16 tensors side by side, ``[2, *sizes]``, whose elements 2 along ``axis`` lie 2^31
    apart. Only the pages that are written become real memory."""
    strides = list(torch.empty(2, *sizes).stride())
    strides[axis + 1] = 2**30
    memory = torch.empty(2**31 + 2**16, dtype=torch.float16)
    return memory.as_strided((2, *sizes), strides)


@pytest.mark.parametrize("axis", range(3))
def test_offsets_beyond_32_bits_in_the_cache(axis: int) -> None:
    qkv, bias = inputs(1, 3, 3, 8, torch.float16)
    k_cache, v_cache = far_apart((3, 3, 3, 8), axis)
    kv_append_triton(qkv, bias, k_cache, v_cache, *where([2], [0], [3]))
    k, v = (qkv[0] + bias).unflatten(1, (3, 3, 8))[:, 1:].unbind(1)
    assert torch.equal(k_cache[2], k.transpose(0, 1))
    assert torch.equal(v_cache[2], v.transpose(0, 1))


@pytest.mark.parametrize("axis", range(2))
def test_offsets_beyond_32_bits_in_the_projection(axis: int) -> None:
    given, bias = inputs(3, 3, 1, 8, torch.float16)
    qkv = far_apart((3, 3, 24), axis)[0]
    qkv.copy_(given)
    at = where([0, 1, 2], [0, 1, 0], [3, 2, 1])
    assert wrong(kv_append_triton, qkv, bias, cache_of(3, 1, 3, 8), at) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_q_is_new_and_contiguous_and_the_projection_unchanged(function: Callable) -> None:
    for rows, tokens in ((1, 1), (4, 4)):
        qkv, bias = inputs(rows, tokens, 3, 8)
        before = qkv.clone(), bias.clone()
        at = tuple(x[:rows] for x in RAGGED)
        q = function(qkv, bias, *cache_of(5, 3, 7, 8)[:, 1], *at)
        assert q.is_contiguous()
        assert q.shape == (rows, tokens, 3, 8)
        q.zero_()
        assert torch.equal(qkv, before[0])
        assert torch.equal(bias, before[1])


def test_the_same_bits_every_time() -> None:
    qkv, bias = inputs(4, 4, 3, 8, torch.float16)
    runs = []
    for _ in range(2):
        cache = cache_of(5, 3, 7, 8, torch.bfloat16)
        runs.append((kv_append_triton(qkv, bias, *cache[:, 1], *RAGGED), cache.nan_to_num(7)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (3, 0)])
def test_nothing_to_append(rows: int, tokens: int, function: Callable) -> None:
    cache = cache_of(5, 3, 7, 8)
    at = where([0] * rows, [0] * rows, [0] * rows)
    q = function(*inputs(rows, tokens, 3, 8), *cache[:, 1], *at)
    assert q.shape == (rows, tokens, 3, 8)
    assert cache.isnan().all()


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    qkv, bias = inputs(4, 4, 3, 8)
    cache = cache_of(5, 3, 7, 8)
    k_cache, v_cache = cache[:, 1]
    slots, starts, counts = RAGGED
    refusals = (
        (ValueError, "24 columns|72 columns", (qkv[..., :-1], bias, k_cache, v_cache, *RAGGED)),
        (ValueError, "72 columns", (qkv, bias[:-1], k_cache, v_cache, *RAGGED)),
        (ValueError, "same shape", (qkv, bias, k_cache, v_cache[:-1], *RAGGED)),
        (ValueError, "unit stride", (qkv, bias, *cache_of(5, 3, 8, 7)[:, 1].mT, *RAGGED)),
        (TypeError, "starts", (qkv, bias, k_cache, v_cache, slots, starts.float(), counts)),
        (
            ValueError,
            r"counts must be \[4\]",
            (qkv, bias, k_cache, v_cache, slots, starts, counts[:3]),
        ),
        (TypeError, "float64", (qkv.double(), bias, k_cache, v_cache, *RAGGED)),
    )
    for error, message, arguments in refusals:
        with pytest.raises(error, match=message):
            kv_append_triton(*arguments)
    assert cache.isnan().all()


def test_opcheck_and_compile() -> None:
    qkv, bias = inputs(4, 4, 3, 8)
    arguments = (qkv, bias, *torch.randn(2, 5, 3, 7, 8), *RAGGED)
    torch.library.opcheck(torch.ops.gptile.kv_append.default, arguments)
    compiled = torch.compile(kv_append_triton, backend="aot_eager", fullgraph=True)
    assert wrong(compiled, qkv, bias, cache_of(5, 3, 7, 8), RAGGED) == []


PLANTED = {
    "padding is stored": ("(token < tl.load(counts_ptr + row))", "(token < n_tokens)"),
    "the last token lost": ("token < tl.load(counts_ptr", "token + 1 < tl.load(counts_ptr"),
    "position 0 for every token": ("(tl.int64) + token", "(tl.int64)"),
    "the row taken for the slot": ("slot = tl.load(slots_ptr + row).to(tl.int64)", "slot = row"),
    "K without its bias": ("bias_ptr + n_cols, cols", "bias_ptr, cols"),
    "V from the place of K": ("qkv_ptr + 2 * n_cols", "qkv_ptr + n_cols"),
    "head 0 for every head": ("head * head_stride", "0 * head_stride"),
    "past the end": (" & (position < max_len)", ""),
    "before the beginning": ("(position >= 0) & ", ""),
    "rounded twice": (
        "    position = tl.load",
        "    k = k.to(tl.float16).to(tl.float32)\n    position = tl.load",
    ),
    "added in 16 bits": (
        "other=0.0).to(tl.float32)\n    return qkv + tl.load(bias_ptr + cols, mask=mask, "
        "other=0.0).to(tl.float32)",
        "other=0.0)\n    return (qkv + tl.load(bias_ptr + cols, mask=mask, other=0.0))",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    append = plant(kernels, *PLANTED[fault]).kv_append_triton
    qkv, bias = inputs(4, 4, 3, 8, torch.float16)
    cache = cache_of(5, 3, 7, 8)
    outside = where([2, 1, 3, 0], [-2, 5, 6, 0], [4, 4, 4, 1])
    assert wrong(append, qkv, bias, cache, RAGGED) or wrong(append, qkv, bias, cache, outside)
