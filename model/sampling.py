"""How a continuation is chosen: the parameters of one request, and of a batch of them."""

import secrets
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from gptile.kernels.philox import philox4x32
from gptile.model.errors import UserError

SEED_LIMIT = 2**63
"""Seeds are below this."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; those that transformers' ``generate`` has too mean the same.

    Attributes:
        max_new_tokens: how many tokens at most; None for as many as the context has room for.
        temperature: divides the logits; 0 takes the likeliest token each time (greedy).
        top_k: keep the k likeliest tokens; 0, or more than there are, keeps all.
        top_p: keep the smallest set of tokens with at least this probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 keeps all.
        repetition_penalty: above 1 makes tokens already in the prompt or the text less likely.
        seed: makes the text reproducible, whatever else is in the batch; None draws one.
        n: how many samples of the prompt; sample 0 is what ``n=1`` gives.
        stop: the text ends before the first of these strings that it would contain.
        stop_token_ids: ids that end the text; None for the model's end-of-text ids.

    Raises:
        UserError: for a value out of range, naming it.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        ids = self.stop_token_ids
        if ids is not None:
            ids = (ids,) if isinstance(ids, Integral) else tuple(ids)
            object.__setattr__(self, "stop_token_ids", ids)
        for name, low, high in (
            ("temperature", 0, 1e30),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-3, 1e3),
        ):
            value: Any = getattr(self, name)
            ok = isinstance(value, Real) and not isinstance(value, bool)
            ok = ok and low <= value <= high  # False for NaN
            _check(ok, name, f"a number from {low:g} to {high:g}", self)
        for name, least, most in (
            ("max_new_tokens", 1, SEED_LIMIT - 1),
            ("top_k", 0, SEED_LIMIT - 1),
            ("n", 1, 2**16),
            ("seed", 0, SEED_LIMIT - 1),
        ):
            value = getattr(self, name)
            optional = value is None and name in ("max_new_tokens", "seed")
            ok = optional or (is_id(value) and least <= value <= most)
            limit = "2^63 - 1" if most == SEED_LIMIT - 1 else str(most)
            _check(ok, name, f"a whole number from {least} to {limit}", self)
        _check(all(is_text(s) for s in stop), "stop", "non-empty strings", self)
        _check(all(is_id(i) for i in ids or ()), "stop_token_ids", "token ids", self)


def sample_seeds(params: SamplingParams) -> list[int]:
    """A seed for each of the request's samples: the first is the request's own (or a fresh one)."""
    seed = secrets.randbelow(SEED_LIMIT) if params.seed is None else params.seed
    index = torch.arange(params.n)
    zero, one = torch.zeros_like(index), torch.ones_like(index)
    # Counters with a one in the last word are no draw's counters (see kernels/philox.py).
    key = (one * (seed & 0xFFFFFFFF), one * (seed >> 32))
    low, high, *_ = philox4x32((index, zero, zero, one), key)
    derived = ((high & 0x7FFFFFFF) << 32) | low
    return [seed, *derived.tolist()[1:]]


@dataclass
class SamplingBatch:
    """The parameters of the rows of a batch as tensors, ``[B]`` each, for the ``sample`` operation.

    Attributes:
        seen: ``[B, V]`` bool, the tokens of each row so far; None if no row has a penalty.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seeds: Tensor
    seen: Tensor | None = None

    @classmethod
    def build(
        cls,
        params: list[SamplingParams],
        seeds: list[int],
        prompts: list[list[int]],
        n_vocab: int,
        device: torch.device,
    ) -> "SamplingBatch":
        """One row for each of the parallel lists."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        seen = None
        if any(p.repetition_penalty != 1 for p in params):
            seen = torch.zeros(len(params), n_vocab, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                ids = torch.tensor(prompt, device=device)
                seen[row, ids[ids < n_vocab]] = True
        return cls(
            temperature=column("temperature", torch.float32),
            # More than all is all, and fits every integer type.
            top_k=torch.tensor([min(p.top_k, n_vocab) for p in params], device=device),
            top_p=column("top_p", torch.float64),
            min_p=column("min_p", torch.float32),
            repetition_penalty=column("repetition_penalty", torch.float32),
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            seen=seen,
        )

    def take(self, rows: Tensor) -> "SamplingBatch":
        """The batch of some of the rows."""
        columns = {name: column[rows] for name, column in vars(self).items() if column is not None}
        return SamplingBatch(**columns)


def _check(ok: bool, name: str, what: str, params: SamplingParams) -> None:
    if not ok:
        raise UserError(f"{name} must be {what}, got {getattr(params, name)!r}")


def is_id(value: object) -> bool:
    """Whether a value, NumPy's included, is a whole number >= 0 and not a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def is_text(value: object) -> bool:
    """Whether a value is a string, not empty, that UTF-8 can hold."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value != ""
