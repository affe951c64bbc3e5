"""Choose the next token of each row: repetition penalty, temperature, top-k, top-p, min-p, draw.

The random number of a draw is a function of (seed, position) alone (philox.py), so a row draws the
same token whoever its batch-mates are.

Tiling. A program owns one row of V logits and walks it in blocks, once for each thing it must know;
nothing is sorted and nothing is kept. Relative to the greatest, scores s are at most 0, so that the
magnitude of s, read as an integer, ranks the tokens. What top-k and top-p keep is a beginning of
the order (rank, id): every rank below a limit and, of those equal to it, the ids up to a last one.
Radix selection (Alabi et al. 2012, https://doi.org/10.1145/2133803.2345676) finds the limit four
bits a walk, from the sums of what lies below 16 pivots: counts for top-k, masses for top-p. One
more walk finds the last id. The draw is the first id whose running mass exceeds the random share of
the whole mass.

Scores have the bits of the reference's, in IEEE fp32; masses are fp64 like the reference's, added
in another order. So both choose the same token, unless a draw, a top-p or a min-p falls on the
boundary between two tokens to within the rounding of fp64.

Bytes, for B rows of elements of s bytes: W walks load ``B W V s`` (and ``B W V`` of ``seen``), the
parameters and the chosen logit ``B (44 + s)``; stored are ``12 B``. W is 1 where all temperatures
are 0 and 3 where none is, with 9 more for top-k and 9 more for top-p: a row is small enough for the
cache after the first. FLOPs an element: 4 a walk, 20 where it selects; of which, for masses, an
fp64 exponential a walk.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptile.kernels.jit import tl, triton
from gptile.kernels.launch import Pass, Shape, Work, check_inputs, example, launch, rows_of
from gptile.kernels.philox import uniform, uniform_in_kernel

MAX_VOCAB = 2**24
"""Counts of tokens are taken in fp32."""
_BLOCK = 1024

SPILL_BUDGET = {"_sample_kernel": 48}
"""Bytes: ptxas keeps on the stack what only the end of the kernel needs, around the calls that an
IEEE division makes. They are stored once and loaded once, outside the walks."""

CASES: dict[str, dict[str, int]] = {
    "gpt2-decode": {"rows": 1, "vocab": 50257},
    "gpt2-decode-batch": {"rows": 8, "vocab": 50257},
    "demo-decode": {"rows": 1, "vocab": 1024},
    "one token": {"rows": 2, "vocab": 1},
    "odd": {"rows": 3, "vocab": 77},
}
"""Shapes by name: what GPT-2 launches, and ragged ones."""


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
        # Relative to the likeliest, without a normaliser: equal scores have exactly equal masses.
        mass = (ranked.double() - ranked[:, :1].double()).exp().masked_fill(dropped, 0)
        mass_before = mass.cumsum(-1) - mass
        goal = mass.sum(-1, keepdim=True) * top_p.unsqueeze(-1)
        dropped |= (mass_before >= goal) & (top_p < 1).unsqueeze(-1)
        dropped[:, 0] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if (min_p > 0).any():
        # p / p_max = exp(s - s_max), whatever the normaliser.
        relative = (scores.double() - scores.amax(-1, keepdim=True).double()).exp()
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
        temperature: ``[B]`` fp32; 0 takes the likeliest token, the lowest id among equals.
        top_k, top_p, min_p: ``[B]``, see :func:`filter_scores`.
        repetition_penalty: ``[B]`` fp32; 1 is none.
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
        # The likeliest token scores 0 and so weighs 1: no normaliser is needed.
        cdf = filtered.double().exp().cumsum(-1)
        target = uniform(seeds, positions).double().unsqueeze(-1) * cdf[:, -1:]
        # Past the end only where a score is NaN; the logprob then is too, and tells.
        draws = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=len(cdf[0]) - 1)
        ids = torch.where(drawn, draws, ids)
    logprobs = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return ids, logprobs


@triton.jit
def _scores(
    logits_ptr,  # the row's logits, [n_cols]
    seen_ptr,  # whether the penalty applies, [n_cols] bool; unused without HAS_SEEN
    penalty,  # repetition penalty
    ids,  # which columns
    n_cols,  # width of the row
    HAS_SEEN: tl.constexpr,  # apply the penalty
):
    """Logits and penalised scores of a block in fp32; -inf beyond the row."""
    mask = ids < n_cols
    logits = tl.load(logits_ptr + ids, mask=mask, other=-float("inf")).to(tl.float32)
    scores = logits
    if HAS_SEEN:
        seen = tl.load(seen_ptr + ids, mask=mask, other=0) != 0
        penalised = tl.where(logits < 0, logits * penalty, tl.div_rn(logits, penalty))
        scores = tl.where(seen, penalised, logits)
    return logits, scores


@triton.jit
def _ranked(
    row,  # logits_ptr, seen_ptr, penalty, best, divisor, n_cols: the row and how its scores scale
    cut,  # limit, last: ranks below limit are kept, and of those equal to it the ids up to last
    ids,  # which columns
    HAS_SEEN: tl.constexpr,  # apply the penalty
):
    """Ranks of a block (uint32, likely tokens first), masses, and which tokens the cut keeps."""
    logits_ptr, seen_ptr, penalty, best, divisor, n_cols = row
    limit, last = cut
    _, scores = _scores(logits_ptr, seen_ptr, penalty, ids, n_cols, HAS_SEEN)
    scaled = tl.div_rn(scores - best, divisor)
    rank = scaled.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    kept = (ids < n_cols) & ((rank < limit) | ((rank == limit) & (ids <= last)))
    return rank, tl.exp(scaled.to(tl.float64)), kept


@triton.jit
def _narrow(
    cut,  # limit and last so far, as in _ranked
    amount,  # how many tokens to keep (fp32) or, BY_MASS, what share of the mass (fp64)
    row,  # as in _ranked
    BY_MASS: tl.constexpr,  # sum masses, not counts
    HAS_SEEN: tl.constexpr,  # apply the penalty
    BLOCK: tl.constexpr,  # tokens looked at together
):
    """The cut that keeps the fewest tokens of the order (rank, id) that reach the amount."""
    n_cols = row[5]
    dtype: tl.constexpr = tl.float64 if BY_MASS else tl.float32
    # Radix selection of the greatest limit below which the goal is not reached.
    limit = tl.full((), 0, tl.uint32)
    total = tl.full((), 0, dtype)
    before = total
    goal = amount
    for step in range(8):
        shift = 28 - 4 * step
        pivots = limit + (tl.arange(0, 16).to(tl.uint32) << shift)
        sums = tl.zeros((16,), dtype)
        for start in range(0, n_cols, BLOCK):
            rank, mass, kept = _ranked(row, cut, start + tl.arange(0, BLOCK), HAS_SEEN)
            value = tl.where(kept, mass if BY_MASS else 1.0, 0.0)
            below = rank[:, None] < pivots[None, :]
            sums += tl.sum(tl.where(below, value[:, None], 0.0), axis=0)
        if BY_MASS:
            # The last pivots of the first step are above every rank, so their sum is the whole. The
            # likeliest token, of mass 1, stays however small the share.
            total = tl.maximum(total, tl.max(sums, axis=0))
            goal = tl.maximum(amount * total, 1.0)
        short = sums < goal
        limit += (tl.sum(short.to(tl.uint32), axis=0) - 1) << shift
        before = tl.max(tl.where(short, sums, 0.0), axis=0)
    # The last of the equals before which the goal is not reached.
    n_equal = 0
    last = -1
    for start in range(0, n_cols, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        rank, mass, kept = _ranked(row, cut, ids, HAS_SEEN)
        equal = (kept & (rank == limit)).to(tl.int32)
        earlier = n_equal + tl.cumsum(equal, axis=0) - equal
        reached = before + earlier * (mass if BY_MASS else 1.0) >= goal
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & ~reached, ids, -1), axis=0))
        n_equal += tl.sum(equal, axis=0)
    return limit, last


@triton.jit
def _draw(
    share,  # random number in [0, 1)
    min_p,  # least mass; the likeliest token has 1
    cut,  # as in _ranked
    row,  # as in _ranked
    HAS_SEEN: tl.constexpr,  # apply the penalty
    BLOCK: tl.constexpr,  # tokens looked at together
):
    """The first id whose running mass exceeds that share of the whole mass."""
    n_cols = row[5]
    whole = tl.full((), 0, tl.float64)
    for start in range(0, n_cols, BLOCK):
        _, mass, kept = _ranked(row, cut, start + tl.arange(0, BLOCK), HAS_SEEN)
        whole += tl.sum(tl.where(kept & (mass >= min_p), mass, 0.0), axis=0)
    running = tl.full((), 0, tl.float64)
    chosen = n_cols
    for start in range(0, n_cols, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, mass, kept = _ranked(row, cut, ids, HAS_SEEN)
        mass = tl.where(kept & (mass >= min_p), mass, 0.0)
        # A parallel sum may round up where nothing is added: what has no mass is never chosen.
        passed = (running + tl.cumsum(mass, axis=0) > share * whole) & (mass > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(passed, ids, n_cols), axis=0))
        running += tl.sum(mass, axis=0)
    # Past the end only where a score is NaN; the logprob then is too, and tells.
    return tl.minimum(chosen, n_cols - 1)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [n_rows, n_cols]
    seen_ptr,  # tokens the penalty applies to, [n_rows, n_cols] bool; unused without HAS_SEEN
    temperature_ptr,  # [n_rows]
    top_k_ptr,  # [n_rows]
    top_p_ptr,  # [n_rows]
    min_p_ptr,  # [n_rows]
    penalty_ptr,  # repetition penalty, [n_rows]
    seeds_ptr,  # int64, [n_rows]
    positions_ptr,  # int64, [n_rows]
    ids_ptr,  # the chosen tokens, int64 [n_rows]
    logprobs_ptr,  # log-softmax of their raw logits, fp32 [n_rows]
    logits_row_stride,  # elements between rows of logits
    seen_row_stride,  # elements between rows of seen
    n_cols,  # width of a row
    HAS_SEEN: tl.constexpr,  # apply the penalty
    BLOCK: tl.constexpr,  # tokens looked at together
):
    index = tl.program_id(0).to(tl.int64)
    logits_ptr += index * logits_row_stride
    seen_ptr += index * seen_row_stride
    temperature = tl.load(temperature_ptr + index).to(tl.float32)
    top_k = tl.load(top_k_ptr + index).to(tl.float32)
    top_p = tl.load(top_p_ptr + index).to(tl.float64)
    min_p = tl.load(min_p_ptr + index).to(tl.float64)
    penalty = tl.load(penalty_ptr + index).to(tl.float32)
    seed, position = tl.load(seeds_ptr + index), tl.load(positions_ptr + index)
    share = uniform_in_kernel(seed, position).to(tl.float64)

    # Log-sum-exp of the logits; the greatest score and the first id that has it. The maximum starts
    # at the least fp32 number: in a block of -inf it would otherwise be subtracted from itself.
    maximum = -3.4028234663852886e38
    total = 0.0
    best = -float("inf")
    chosen = 0
    for start in range(0, n_cols, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits, scores = _scores(logits_ptr, seen_ptr, penalty, ids, n_cols, HAS_SEEN)
        greatest = tl.maximum(maximum, tl.max(logits, axis=0))
        total = total * tl.exp(maximum - greatest) + tl.sum(tl.exp(logits - greatest), axis=0)
        maximum = greatest
        block_best = tl.max(scores, axis=0)
        first = tl.min(tl.where(scores == block_best, ids, n_cols), axis=0)
        chosen = tl.where(block_best > best, first, chosen)
        best = tl.maximum(best, block_best)

    if temperature > 0:
        divisor = tl.maximum(temperature, 1.1754943508222875e-38)  # the least normal fp32 number
        row = (logits_ptr, seen_ptr, penalty, best, divisor, n_cols)
        limit = tl.full((), 0xFFFFFFFF, tl.uint32)  # beyond every rank: all are kept
        last = -1
        if top_k > 0:
            limit, last = _narrow((limit, last), top_k, row, False, HAS_SEEN, BLOCK)
        if top_p < 1:
            limit, last = _narrow((limit, last), top_p, row, True, HAS_SEEN, BLOCK)
        chosen = _draw(share, min_p, (limit, last), row, HAS_SEEN, BLOCK)

    logit = tl.load(logits_ptr + chosen).to(tl.float32)
    tl.store(ids_ptr + index, chosen)
    tl.store(logprobs_ptr + index, logit - maximum - tl.log(total))


def launch_sample(logits: Tensor, seen: Tensor | None, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """``(ids, logprobs)``; columns in the order of :func:`sample_reference`."""
    check_inputs(logits, indices=(seen, *columns))
    n_rows, n_cols = logits.shape
    if not 0 < n_cols <= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {n_cols} tokens is not one of 1 to {MAX_VOCAB}")
    for column in columns:
        if column.shape != (n_rows,):
            raise ValueError(f"a parameter of shape {tuple(column.shape)} for {n_rows} rows")
    if seen is not None and (seen.shape != logits.shape or seen.dtype != torch.bool):
        raise ValueError(
            f"seen is {seen.dtype} {tuple(seen.shape)}, not bool {tuple(logits.shape)}"
        )
    ids = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    if n_rows:
        rows = rows_of(logits)
        marks = rows if seen is None else rows_of(seen)
        block = min(_BLOCK, triton.next_power_of_2(n_cols))
        launch(
            _sample_kernel,
            (n_rows,),
            rows,
            marks,
            *(column.contiguous() for column in columns),
            ids,
            logprobs,
            rows.stride(0),
            marks.stride(0),
            n_cols,
            HAS_SEEN=seen is not None,
            BLOCK=block,
            # Two tokens a thread, each of them with 16 sums.
            num_warps=max(1, block // 64),
            # A fused multiply-add in the scores would not have the reference's bits.
            enable_fp_fusion=False,
        )
    return ids, logprobs


@torch.library.custom_op("gptile::sample", mutates_args=())
def _sample(
    logits: Tensor,
    seen: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    columns = (temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions)
    return launch_sample(logits, seen, *columns)


@_sample.register_fake
def _(logits: Tensor, seen: Tensor | None, *columns: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = logits.shape[0]
    ids = logits.new_empty(n_rows, dtype=torch.int64)
    return ids, logits.new_empty(n_rows, dtype=torch.float32)


def sample_triton(
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
    """:func:`sample_reference` in one kernel, for up to :data:`MAX_VOCAB` tokens."""
    return _sample(
        logits, seen, temperature, top_k, top_p, min_p, repetition_penalty, seeds, positions
    )


_SEARCH_WALKS = 9
_PARAMETERS_BYTES = 44


def inputs(
    shape: Shape, dtype: torch.dtype, device: Any, *, temperature: float, filters: bool
) -> dict[str, Any]:
    """The arguments of :func:`sample_reference` for a case."""
    logits = example(shape["rows"], shape["vocab"], dtype=dtype, device=device)

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((shape["rows"],), value, dtype=dtype, device=device)

    return {
        "logits": logits,
        "seen": torch.zeros_like(logits, dtype=torch.bool) if filters else None,
        "temperature": column(temperature, torch.float32),
        "top_k": column(50 if filters else 0, torch.int64),
        "top_p": column(0.9 if filters else 1, torch.float64),
        "min_p": column(0.05 if filters else 0, torch.float32),
        "repetition_penalty": column(1.2 if filters else 1, torch.float32),
        "seeds": column(7, torch.int64),
        "positions": column(100, torch.int64),
    }


def _launch(shape: Shape, dtype: torch.dtype, device: Any, **choices: Any) -> None:
    launch_sample(*inputs(shape, dtype, device, **choices).values())


def _work(shape: Shape, dtype: torch.dtype, *, temperature: float, filters: bool) -> Work:
    rows, elements = shape["rows"], shape["rows"] * shape["vocab"]
    walks = (3 if temperature else 1) + (2 * _SEARCH_WALKS if filters else 0)
    loaded = walks * elements * (dtype.itemsize + filters)
    loaded += rows * (_PARAMETERS_BYTES + dtype.itemsize)
    flops = 4 * walks + (2 * 8 * 16 if filters else 0)
    stored = rows * (8 + 4)
    distinct = elements * (dtype.itemsize + filters) + rows * _PARAMETERS_BYTES + stored
    return Work(loaded, stored, distinct, flops * elements)


PASSES = {
    name: Pass(
        partial(_launch, temperature=temperature, filters=filters),
        partial(_work, temperature=temperature, filters=filters),
    )
    for name, temperature, filters in (
        ("greedy", 0.0, False),
        ("temperature", 0.8, False),
        ("filters", 0.8, True),
    )
}
