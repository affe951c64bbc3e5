"""Choose the next token of each row: repetition penalty, temperature, top-k, top-p, min-p, draw.

The random number of a draw is a function of (seed, position) alone: Philox4x32-10 (Salmon et al.
2011, https://doi.org/10.1145/2063384.2063405), with the same key, counter and float conversion as
``tl.rand(seed, position)``. So a row draws the same token whoever its batch-mates are.
"""

from typing import TypeAlias

import torch
from torch import Tensor

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


def filter_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mask out all but the likeliest tokens of each row with ``-inf``.

    Top-k comes first, top-p (nucleus sampling, https://arxiv.org/abs/1904.09751) sees what is left
    renormalised, then min-p (https://arxiv.org/abs/2407.01082): the order and the meaning of
    transformers. Equal scores rank by lower id, so top_k = 1 leaves one token.

    Args:
        scores: ``[B, V]``.
        top_k: ``[B]`` integers; 0, or V and more, keeps all.
        top_p: ``[B]`` in [0, 1]; the smallest set of tokens whose mass reaches top_p; 1 keeps all.
        min_p: ``[B]`` in [0, 1]; drops tokens less likely than min_p times the likeliest.
    """
    n_vocab = scores.shape[-1]
    by_rank = (top_k > 0) | (top_p < 1)
    if by_rank.any():
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        limit = torch.where(top_k > 0, top_k, n_vocab).unsqueeze(-1)
        dropped = torch.arange(n_vocab, device=scores.device) >= limit
        probabilities = ranked.masked_fill(dropped, -torch.inf).double().softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        dropped |= (mass_before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)
        dropped[:, 0] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if (min_p > 0).any():
        # p / p_max = exp(s - s_max), whatever the normaliser.
        relative = (scores - scores.amax(-1, keepdim=True)).exp()
        scores = scores.masked_fill(relative < min_p.unsqueeze(-1), -torch.inf)
    return scores


def sample_reference(
    logits: Tensor,
    seen: Tensor | None,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: ``[B, V]``.
        seen: ``[B, V]`` bool, the tokens the repetition penalty applies to
            (https://arxiv.org/abs/1909.05858), once each; None for none.
        temperature: ``[B]``; 0 takes the likeliest token, the lowest id among equals.
        top_k, top_p, min_p: ``[B]``, see :func:`filter_scores`.
        repetition_penalty: ``[B]``; 1 is none.
        seeds, positions: ``[B]`` int64; together they fix the row's random number.

    Returns:
        ``(ids [B] int64, logprobs [B])``; a logprob is the log-softmax of the raw logits at the
        chosen id: before penalty, temperature and filters.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits
    if seen is not None:
        penalty = repetition_penalty.unsqueeze(-1)
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen, penalised, scores)
    ids = scores.argmax(-1)
    drawn = temperature > 0
    if drawn.any():
        # Subtracting the maximum first keeps every temperature finite: 0 / t = 0, -x / t -> -inf.
        divisor = torch.where(drawn, temperature, 1).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (scores - scores.amax(-1, keepdim=True)) / divisor.unsqueeze(-1)
        filtered = filter_scores(scaled, top_k, top_p, min_p)
        cdf = filtered.double().softmax(-1).cumsum(-1)
        # Scaled by the last entry, which is 1 only up to rounding, so that target < cdf[-1].
        target = uniform(seeds, positions).double().unsqueeze(-1) * cdf[:, -1:]
        # Past the end only where a score is NaN; the logprob then is too, and tells.
        draws = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=len(cdf[0]) - 1)
        ids = torch.where(drawn, draws, ids)
    logprobs = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return ids, logprobs
