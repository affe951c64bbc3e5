"""Cached generation is uncached generation; unused parts of a cache, filled with NaN, are never
read; a refused append changes nothing."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import ContextLengthError, KVCache


def poisoned(model: GPT2, n_slots: int, max_len: int = 32) -> KVCache:
    cache = KVCache(model.config, n_slots, max_len)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


@torch.no_grad()
def feed(model: GPT2, cache: KVCache, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    parts = [model(part, cache=cache).logits for part in ids.split(pieces, 1)]
    return torch.cat(parts, 1)


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.sets(st.integers(1, 11)),
    n_rows=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_split_of_a_prompt_gives_the_same_logits(small_model, cuts, n_rows, seed) -> None:
    torch.manual_seed(seed)
    model = small_model()
    ids = torch.randint(61, (n_rows, 12))
    edges = [0, *sorted(cuts), 12]
    pieces = [b - a for a, b in pairwise(edges)]
    got = feed(model, poisoned(model, n_rows), ids, pieces)
    torch.testing.assert_close(got, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_reused_cache_equals_a_fresh_one(model: GPT2) -> None:
    cache = poisoned(model, 4)
    feed(model, cache, torch.randint(61, (4, 30)), [30])
    cache.reset()
    ids = torch.randint(61, (2, 9))
    assert torch.equal(
        feed(model, cache, ids, [4, 5]), feed(model, poisoned(model, 2), ids, [4, 5])
    )


def test_truncation_forgets(model: GPT2) -> None:
    cache = poisoned(model, 1)
    ids = torch.randint(61, (1, 12))
    feed(model, cache, torch.cat([ids[:, :5], torch.randint(61, (1, 10))], 1), [15])
    cache.truncate(0, 5)
    cache.k[:, :, :, 5:] = torch.nan
    torch.testing.assert_close(feed(model, cache, ids[:, 5:], [7]), model(ids).logits[:, 5:])
    for length in (-1, 13):
        with pytest.raises(ValueError, match="truncate"):
            cache.truncate(0, length)


def test_a_copy_continues_by_itself(model: GPT2) -> None:
    cache = poisoned(model, 3)
    ids = torch.randint(61, (2, 10))
    ids[1, :6] = ids[0, :6]
    with torch.no_grad():
        model(ids[:1, :6], cache=cache, slots=torch.tensor([1]))
        cache.copy(1, 2)
        got = model(ids[:, 6:], cache=cache, slots=torch.tensor([1, 2])).logits
    torch.testing.assert_close(got, model(ids).logits[:, 6:])
    assert cache.lengths.tolist() == [0, 10, 10]


def test_overflow_is_refused_before_anything_is_written(model: GPT2) -> None:
    cache = poisoned(model, 2, max_len=8)
    with torch.no_grad():
        model(torch.randint(61, (1, 6)), cache=cache, slots=torch.tensor([1]))
    before = cache.k.clone(), cache.lengths.clone()
    refused = pytest.raises(ContextLengthError, match=r"slot 1 holds 6 of 8.*3 more")
    with torch.no_grad(), refused:
        model(torch.randint(61, (2, 3)), cache=cache)
    assert torch.equal(cache.k.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(cache.lengths, before[1])
    with torch.no_grad():
        model(torch.randint(61, (2, 2)), cache=cache)  # 8 of 8 fits


def test_an_unchecked_advance_is_an_append(model: GPT2) -> None:
    caches = poisoned(model, 3), poisoned(model, 3)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    for counts in ([5, 1], [1, 1], [2, 8]):
        given = torch.tensor(counts, dtype=torch.int32)
        spans = caches[0].advance(slots, given), caches[1].append(slots.long(), given.long())
        for name in ("slots", "starts", "counts"):
            got, expected = (getattr(span, name) for span in spans)
            assert got.dtype == expected.dtype == torch.int32
            assert got.tolist() == expected.tolist()
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
    assert caches[0].lengths.tolist() == [10, 0, 8]


def test_an_advance_reads_nothing_back(model: GPT2) -> None:
    """As on a device that cannot be asked: a meta tensor has no values to read."""
    cache = KVCache(model.config, 3, 8, device="meta")
    slots = torch.zeros(2, dtype=torch.int32, device="meta")
    lengths = cache.lengths
    assert cache.advance(slots, slots).starts.shape == (2,)
    assert cache.lengths is lengths, "a graph would go on with the old tensor"
    with pytest.raises((RuntimeError, NotImplementedError)):
        cache.append(slots, slots)


def test_padding_past_the_end_of_the_context_is_harmless(model: GPT2) -> None:
    # Row 0 has one token to go before the context ends, row 1 brings five.
    ids = torch.randint(61, (2, 32))
    cache = poisoned(model, 2)
    with torch.no_grad():
        model(ids[:, :31], cache=cache, lengths=torch.tensor([31, 3]))
        new = torch.stack([torch.cat([ids[0, 31:], torch.zeros(4, dtype=torch.long)]), ids[1, 3:8]])
        got = model(new, cache=cache, lengths=torch.tensor([1, 5]), logits_for="last").logits
    torch.testing.assert_close(got[0, 0], model(ids[:1]).logits[0, -1])
    torch.testing.assert_close(got[1, 0], model(ids[1:, :8]).logits[0, -1])


def test_a_cache_beyond_the_context_is_refused(model: GPT2) -> None:
    with pytest.raises(ContextLengthError, match=r"33.*32"):
        KVCache(model.config, 1, 33)


@pytest.mark.parametrize("slots", [[1, 1], [0, 2], [-1, 0]])
def test_slots_are_distinct_and_there(model: GPT2, slots: list[int]) -> None:
    cache = poisoned(model, 2)
    with torch.no_grad(), pytest.raises(ValueError, match="slots"):
        model(torch.randint(61, (2, 3)), cache=cache, slots=torch.tensor(slots))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [[0, 3], [3, 4], [-1, 1]])
def test_lengths_are_within_the_input(model: GPT2, lengths: list[int]) -> None:
    cache = poisoned(model, 2)
    for where in (None, cache):
        with torch.no_grad(), pytest.raises(ValueError, match="lengths"):
            model(torch.randint(61, (2, 3)), lengths=torch.tensor(lengths), cache=where)
    assert cache.lengths.tolist() == [0, 0]


def test_a_cache_and_gradients_do_not_go_together(model: GPT2) -> None:
    with pytest.raises(ValueError, match="no_grad"):
        model(torch.randint(61, (1, 3)), cache=poisoned(model, 1))
