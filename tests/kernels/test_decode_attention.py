"""Attention against the cache in Triton's interpreter against fp64: ragged rows in any slots, NaN
in everything that must not be read, and proof that wrong kernels are seen.

Up to MAX_QUERIES tokens a row run on the kernels of decode_attention.py, longer chunks on that of
attention.py.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gptile.kernels import attention, decode_attention
from gptile.kernels.decode_attention import CASES, MAX_QUERIES, decode_attention_reference

MAX_LEN = 200
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]


def problem(
    starts: Sequence[int],
    counts: Sequence[int],
    heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    max_len: int = MAX_LEN,
) -> Problem:
    """Rows in slots in reverse, one slot unused; NaN beyond every row's length and in padding."""
    n_rows = len(starts)
    q = torch.randn(n_rows, max(counts), heads, head_dim) * 1.5 + 0.3
    caches = torch.full((2, n_rows + 1, heads, max_len, head_dim), torch.nan)
    slots = torch.arange(n_rows, 0, -1, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        filled = torch.randn(2, heads, start + count, head_dim) * 1.5 + 0.3
        caches[:, slots[row], :, : start + count] = filled
        q[row, count:] = torch.nan
    spans = [torch.tensor(x, dtype=torch.int32) for x in (starts, counts)]
    k_cache, v_cache = caches.to(cache_dtype or dtype).unbind(0)
    return q.to(dtype), k_cache, v_cache, slots, spans[0], spans[1], head_dim**-0.5


def truth(args: Problem) -> Tensor:
    """By the formula in fp64, a query at a time."""
    q, k_cache, v_cache, slots, starts, counts, scale = args
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        for i in range(int(counts[row])):
            seen = int(starts[row]) + i + 1
            k, v = (c[slots[row], :, :seen].double() for c in (k_cache, v_cache))
            scores = torch.einsum("hd,hjd->hj", q[row, i].double(), k) * scale
            out[row, i] = torch.einsum("hj,hjd->hd", scores.softmax(-1), v)
    return out.flatten(2)


def wrong(function: Callable[..., Tensor], args: Problem) -> bool:
    """Whether the result is further from fp64 than twice PyTorch's own error."""
    exact = truth(args)

    def error(got: Tensor) -> float:
        return ((got.double() - exact).norm() / exact.norm()).item()

    allowed = 2 * error(decode_attention_reference(*args)) + torch.finfo(args[0].dtype).eps
    return not error(function(*args)) <= allowed  # NaN is wrong


def ours(*args: object) -> Tensor:
    return decode_attention.decode_attention_triton(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype) -> None:
    shape = CASES[case]
    rows, tokens = min(shape["rows"], 2), shape["tokens"]
    starts = [shape["length"] - tokens] * rows
    args = problem(starts, [tokens] * rows, 2, shape["head_dim"], dtype, max_len=1024)
    assert not wrong(ours, args)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("tokens", [1, MAX_QUERIES, MAX_QUERIES + 1, 40])
def test_lengths_around_every_block_edge(length: int, tokens: int) -> None:
    if tokens <= length:
        assert not wrong(ours, problem([length - tokens], [tokens], 1))


@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([0, 63, 64, 150], [1, 1, 1, 1]),
        ([5, 61, 0, 190], [4, 8, 1, 3]),
        ([20, 0, 130, 61], [1, 140, 70, 9]),
        ([0, 0], [130, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ragged_rows(starts: list[int], counts: list[int], dtype: torch.dtype) -> None:
    args = problem(starts, counts, dtype=dtype)
    assert not wrong(ours, args)
    out = ours(*args)
    for row, count in enumerate(counts):
        assert not out[row, count:].any(), "padding must come out as zero"


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_of_another_precision(cache_dtype: torch.dtype, tokens: int) -> None:
    assert not wrong(ours, problem([70, 3], [tokens, 1], cache_dtype=cache_dtype))


def test_one_query_against_twenty_keys() -> None:
    """Case triton-lang/kernels#6."""
    assert not wrong(ours, problem([19], [1], head_dim=64))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_gives_the_same_bits_whatever_its_neighbours_and_the_cache(tokens: int) -> None:
    q, k_cache, v_cache, slots, starts, counts, scale = problem([10, 100, 64], [tokens] * 3)
    together = ours(q, k_cache, v_cache, slots, starts, counts, scale)
    for row in range(3):
        one = slice(row, row + 1)
        length = int(starts[row] + counts[row])
        caches = (c[:, :, :length].contiguous() for c in (k_cache, v_cache))
        alone = ours(q[one], *caches, slots[one], starts[one], counts[one], scale)
        assert torch.equal(alone[0], together[row])


def test_peaked_scores_stay_finite() -> None:
    q, *rest = problem([130, 5], [2, 1], dtype=torch.float16)
    q = q.nan_to_num() * 200
    out = ours(q, *rest[:-1], 1.0)
    assert out.isfinite().all()
    assert not wrong(ours, (q, *rest[:-1], 1.0))


def test_strided_queries_wide_indices_and_a_layer_of_a_cache() -> None:
    q, k_cache, v_cache, slots, starts, counts, scale = problem([40, 3], [2, 2], head_dim=24)
    expected = ours(q, k_cache, v_cache, slots, starts, counts, scale)
    layers = torch.full((2, 3, *k_cache.shape), torch.nan)
    layers[0, 1], layers[1, 1] = k_cache, v_cache
    packed = torch.full((2, 2, 3, 2, 24), torch.nan)
    packed[:, :, 0] = q
    spans = (torch.stack([x.long(), x.long() + 1], 1)[:, 0] for x in (slots, starts, counts))
    got = ours(packed[:, :, 0], layers[0, 1], layers[1, 1], *spans, scale)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_span_beyond_the_slot_reads_nothing_there(tokens: int) -> None:
    """The cache refuses such a span; a kernel given one must not reach another head."""
    q, k_cache, v_cache, slots, starts, counts, scale = problem([70 - tokens], [tokens], max_len=70)
    k_cache[slots[0], 1], v_cache[slots[0], 1] = torch.nan, torch.nan
    out = ours(q, k_cache, v_cache, slots, starts + 500, counts, scale)
    assert out[:, :, :16].isfinite().all()


def test_refusals_and_no_rows() -> None:
    args = problem([3], [1], head_dim=129)
    with pytest.raises(ValueError, match="head_dim 129"):
        ours(*args)
    q, k_cache, v_cache, *rest = problem([3], [1])
    with pytest.raises(ValueError, match="strides"):
        ours(q, k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2), *rest)
    with pytest.raises(ValueError, match="do not match"):
        ours(q[:, :, :1], k_cache, v_cache, *rest)
    with pytest.raises(ValueError, match="slots must be"):
        ours(q, k_cache, v_cache, rest[0].expand(2), *rest[1:])
    with pytest.raises(TypeError, match="starts must be int32"):
        ours(q, k_cache, v_cache, rest[0], rest[1].float(), *rest[2:])
    none = torch.zeros(0, dtype=torch.int32)
    assert ours(q[:0], k_cache, v_cache, none, none, none, 1.0).shape == (0, 1, 32)


@pytest.mark.parametrize("tokens", [2, 12])
def test_opcheck_and_compile(tokens: int) -> None:
    args = problem([70, 3], [tokens, tokens])
    torch.library.opcheck(torch.ops.gptile.decode_attention.default, args)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args), ours(*args))


PLANTED = {
    "a glimpse of the future": ("<= start + tokens[:, None]", "<= start + tokens[:, None] + 1"),
    "beyond the row's end": (
        "v = load_tile(v_ptr + base, token_stride, keys, dims, n_keys,",
        "v = load_tile(v_ptr + base, token_stride, keys, dims, 200,",
    ),
    "slot for row": ("slot = tl.load(slots_ptr + row)", "slot = tl.load(slots_ptr + 0)"),
    "head 0 for every head": ("slot * slot_stride + head * head_stride", "slot * slot_stride"),
    "unscaled": ("input_precision=PRECISION) * scale", "input_precision=PRECISION)"),
    "an empty block gives NaN": ('tl.where(maximum == -float("inf"), 0.0, maximum)', "maximum"),
    "the last block lost": (
        "(n_keys + BLOCK_N - 1) // BLOCK_N",
        "tl.maximum(n_keys // BLOCK_N, 1)",
    ),
    "blocks of equal weight": (
        "weights = tl.exp2((lse - new_maximum) * LOG2_E)",
        "weights = tl.where(lse > -1e30, 1.0, 0.0)",
    ),
    "log-sum-exp without its maximum": ("maximum + tl.log(total), mask", "tl.log(total), mask"),
    "padding not zero": ("if token >= count:", "if token > count + 100:"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    module = plant(decode_attention, *PLANTED[fault])
    args = problem([62, 100, 5], [4, 1, 3])
    out = module.decode_attention_triton(*args)
    expected = truth(args)
    padded = any(out[row, count:].nan_to_num(1).any() for row, count in enumerate((4, 1, 3)))
    assert padded or wrong(module.decode_attention_triton, args), expected


PLANTED_CHUNKED = {
    "positions from zero": ("positions = start + tokens", "positions = tokens"),
    "slot for row": ("slot = tl.load(slots_ptr + row)", "slot = tl.load(slots_ptr + 0)"),
    "stale keys": ("tl.minimum(start + count,", "tl.minimum(start + n_tokens,"),
    "padding not zero": ("tl.where(tokens[:, None] < count, ", "tl.where(tokens[:, None] < 999, "),
}


@pytest.mark.parametrize("fault", PLANTED_CHUNKED)
def test_a_fault_planted_in_the_kernel_of_long_chunks_is_seen(
    plant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    planted = plant(attention, *PLANTED_CHUNKED[fault])
    monkeypatch.setattr(decode_attention, "launch_cached", planted.launch_cached)
    assert wrong(ours, problem([62, 100, 5], [40, 12, 3]))
