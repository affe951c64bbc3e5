"""Prompts to continuations: prefill, then one token a step for every row still running.

The context limit is decided here, in :func:`token_budget`, and nowhere else: prompt and new tokens
together fit the model's ``n_positions``, or the request is refused before anything is computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import ContextLengthError, KVCache
from gptile.model.sampling import SamplingBatch, SamplingParams, is_id, sample_seeds
from gptile.model.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from gptile.model.speculative import Speculation

PREFILL_CHUNK = 512
"""Prompt tokens a row and forward pass: bounds the memory that a long prompt's activations take."""

Prompt: TypeAlias = str | Sequence[int]
FinishReason: TypeAlias = Literal["stop", "length"]
DecodeStep: TypeAlias = Callable[[Tensor, KVCache, Tensor], Tensor]
"""From ids ``[B]``, a cache and the rows' slots ``[B]`` to the logits ``[B, V]`` after one more
token a row: :class:`~gptile.model.cpu_decoder.CPUDecoder` is one."""


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sample.

    Attributes:
        prompt_index, sample_index: whose token it is.
        id: of the token.
        logprob: natural log of its probability under the model, before any sampling parameter.
        text: what the sample's text grew by; may be empty while a character is incomplete or a stop
            string undecided. Always empty without a tokeniser.
        finish_reason: None but for a sample's last token: "stop" at an end-of-text id or a stop
            string, "length" at ``max_new_tokens`` or the end of the context.
    """

    prompt_index: int
    sample_index: int
    id: int
    logprob: float
    text: str
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """One finished sample.

    Attributes:
        prompt_index, sample_index: which it is.
        prompt_ids: the prompt as the model saw it.
        ids: the new tokens; like transformers' they include the one that ended the text.
        text: of the new tokens, without end-of-text id and stop string; None without a tokeniser.
        logprobs: one per new token, see :class:`TokenEvent`.
        finish_reason: "stop" or "length".
        seed: generates this sample again, as sample 0.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: FinishReason
    seed: int

    @property
    def n_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def n_new_tokens(self) -> int:
        return len(self.ids)


def generate(
    model: GPT2,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    decode_step: DecodeStep | None = None,
    speculate: "Speculation | None" = None,
) -> list[Completion]:
    """Continue one prompt or several, as one batch; each comes out as if it were alone.

    Args:
        model: in evaluation mode.
        prompts: text, token ids, or a list of either. An empty one starts from ``bos_token_id``.
        params: for all prompts, or one per prompt.
        tokenizer: needed for text in, text out and stop strings.
        decode_step: computes the steps after the prompts in place of the model.
        speculate: drafts tokens, so that a pass of the model may yield several; the same text. Not
            with a ``decode_step``, which computes one token a row.

    Returns:
        The samples, by prompt and then by sample.

    Raises:
        ContextLengthError: if a prompt and its new tokens exceed the context.
        UserError: for a prompt or parameter that cannot be used.
    """
    rows = _build_rows(model, prompts, params, tokenizer)
    for _ in _events(model, rows, tokenizer, decode_step, speculate):
        pass
    return [row.completion() for row in rows]


def stream(
    model: GPT2,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    decode_step: DecodeStep | None = None,
    speculate: "Speculation | None" = None,
) -> Iterator[TokenEvent]:
    """:func:`generate`, token by token: the events of one step come in the order of the rows, those
    of one row together where ``speculate`` makes them several.

    Bad input raises here, before the first event is asked for.
    """
    rows = _build_rows(model, prompts, params, tokenizer)
    return _events(model, rows, tokenizer, decode_step, speculate)


def token_budget(n_prompt: int, max_new_tokens: int | None, n_positions: int) -> int:
    """How many tokens may follow a prompt of ``n_prompt``.

    Raises:
        ContextLengthError: if that many do not fit, or none does.
    """
    room = n_positions - n_prompt
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {n_prompt} tokens and leaves no room in a context of {n_positions}; "
            "shorten it"
        )
    if max_new_tokens is not None and max_new_tokens > room:
        raise ContextLengthError(
            f"a prompt of {n_prompt} tokens and {max_new_tokens} new ones exceed the context of "
            f"{n_positions}; ask for at most {room} or shorten the prompt"
        )
    return room if max_new_tokens is None else max_new_tokens


@dataclass
class Row:
    """One sample being generated; its index in the batch is its cache slot."""

    prompt_index: int
    sample_index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    budget: int
    stop_ids: frozenset[int]
    text: TextStream | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def push(self, id: int, logprob: float) -> TokenEvent:
        self.ids.append(id)
        self.logprobs.append(logprob)
        piece = ""
        if id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.text is not None:
            piece = self.text.push(id)
            if self.text.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.ids) == self.budget:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            piece += self.text.finish()
        self.pieces.append(piece)
        return TokenEvent(
            self.prompt_index, self.sample_index, id, logprob, piece, self.finish_reason
        )

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_ids=self.prompt,
            ids=self.ids,
            text=None if self.text is None else "".join(self.pieces),
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            seed=self.seed,
        )


def _build_rows(
    model: GPT2,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
) -> list[Row]:
    if model.training:
        raise ValueError("the model is in training mode, where dropout acts; call model.eval()")
    config = model.config
    prompt_list = _as_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        params_list = [params or SamplingParams()] * len(prompt_list)
    else:
        params_list = list(params)
    if len(params_list) != len(prompt_list):
        raise UserError(f"{len(prompt_list)} prompts but {len(params_list)} sampling parameters")
    rows = []
    for index, (prompt, p) in enumerate(zip(prompt_list, params_list, strict=True)):
        ids = _prompt_ids(prompt, index, config, tokenizer)
        budget = token_budget(len(ids), p.max_new_tokens, config.n_positions)
        if p.stop and tokenizer is None:
            raise UserError("stop strings need a tokeniser")
        stop_ids = config.eos_token_ids if p.stop_token_ids is None else p.stop_token_ids
        rows += [
            Row(
                prompt_index=index,
                sample_index=sample,
                prompt=ids,
                params=p,
                seed=seed,
                budget=budget,
                stop_ids=frozenset(stop_ids),
                text=None if tokenizer is None else TextStream(tokenizer, p.stop),
            )
            for sample, seed in enumerate(sample_seeds(p))
        ]
    return rows


def _as_list(prompts: Any) -> list[Any]:
    """One entry per prompt; tensors and arrays become lists."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    prompts = [_plain(prompt) for prompt in prompts]
    if not prompts:
        raise UserError("no prompts given; an empty one is [[]] or ''")
    several = all(isinstance(prompt, (str, Sequence)) for prompt in prompts)
    return prompts if several else [prompts]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value


def _prompt_ids(
    prompt: Prompt, index: int, config: GPT2Config, tokenizer: Tokenizer | None
) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(
                f"prompt {index} is text and there is no tokeniser for this model; pass token ids"
            )
        given: Sequence[Any] = tokenizer.encode(prompt)
    else:
        given = prompt
    if not given:
        if config.bos_token_id is None:
            raise UserError(f"prompt {index} is empty and the model has no bos_token_id")
        given = [config.bos_token_id]
    for id in given:
        if not is_id(id) or id >= config.vocab_size:
            raise UserError(
                f"prompt {index}: {id!r} is not a token id of this model (0 to "
                f"{config.vocab_size - 1})"
            )
    return [int(id) for id in given]


def _usable_vocab(config: GPT2Config, tokenizer: Tokenizer | None) -> int:
    """Ids below this may be generated: rows that only pad the vocabulary have no text."""
    return config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.n_vocab)


def _events(
    model: GPT2,
    rows: list[Row],
    tokenizer: Tokenizer | None,
    decode_step: DecodeStep | None,
    speculate: "Speculation | None",
) -> Iterator[TokenEvent]:
    """Fill in the rows, yielding an event per token; bad input raises before the first."""
    n_vocab = _usable_vocab(model.config, tokenizer)
    if speculate is None:
        return _run(model, rows, n_vocab, decode_step)
    if decode_step is not None:
        raise UserError(
            "a decode_step computes one token a row and cannot check several: leave out it or "
            "speculate (a draft model may have one of its own)"
        )
    speculate.check(model, rows, tokenizer)
    return speculate.run(model, rows, n_vocab)


@torch.inference_mode()
def _run(
    model: GPT2, rows: list[Row], n_vocab: int, decode_step: DecodeStep | None
) -> Iterator[TokenEvent]:
    weight = model.wte.weight
    cache, batch, logits = prepare(model, rows, n_vocab)
    slots = torch.arange(len(rows), device=weight.device)
    positions = torch.tensor([len(row.prompt) for row in rows], device=weight.device)
    while rows:
        ids, logprobs = model.ops.sample(logits[:, :n_vocab], positions=positions, **vars(batch))
        running = []
        for index, (row, id, logprob) in enumerate(
            zip(rows, ids.tolist(), logprobs.tolist(), strict=True)
        ):
            check_logprob(logprob, weight.dtype)
            yield row.push(id, logprob)
            if row.finish_reason is None:
                running.append(index)
        if batch.seen is not None:
            batch.seen.scatter_(1, ids.unsqueeze(1), True)
        if len(running) < len(rows):
            # Finished rows leave the batch; the others keep their cache slots.
            rows = [rows[index] for index in running]
            keep = torch.tensor(running, dtype=torch.int64, device=weight.device)
            ids, slots, positions, batch = ids[keep], slots[keep], positions[keep], batch.take(keep)
        if rows:
            if decode_step is None:
                logits = _last_logits(model, ids.unsqueeze(1), cache, slots)
            else:
                logits = decode_step(ids, cache, slots)
            positions = positions + 1


def prepare(model: GPT2, rows: list[Row], n_vocab: int) -> tuple[KVCache, SamplingBatch, Tensor]:
    """A cache with the rows' prompts in it, their parameters, and the logits after the prompts,
    ``[len(rows), V]``."""
    weight = model.wte.weight
    # The last token of a row is never fed back.
    max_len = max(len(row.prompt) + row.budget - 1 for row in rows)
    cache = KVCache(model.config, len(rows), max_len, dtype=weight.dtype, device=weight.device)
    batch = SamplingBatch.build(
        [row.params for row in rows],
        [row.seed for row in rows],
        [row.prompt for row in rows],
        n_vocab,
        weight.device,
    )
    # Each prompt is computed once.
    firsts = [slot for slot, row in enumerate(rows) if row.sample_index == 0]
    last = feed(model, cache, firsts, [rows[slot].prompt for slot in firsts])
    logits = dict(zip(firsts, last, strict=True))
    for slot, row in enumerate(rows):
        if row.sample_index > 0:
            first = slot - row.sample_index
            cache.copy(first, slot)
            logits[slot] = logits[first]
    return cache, batch, torch.stack([logits[slot] for slot in range(len(rows))])


def feed(model: GPT2, cache: KVCache, slots: list[int], texts: list[list[int]]) -> Tensor:
    """Append a text to each of the slots, in chunks; the logits after it, ``[len(slots), V]``."""
    device = model.wte.weight.device
    logits: dict[int, Tensor] = {}
    for start in range(0, max(map(len, texts)), PREFILL_CHUNK):
        rest = [(slot, text) for slot, text in zip(slots, texts, strict=True) if len(text) > start]
        chunks = [text[start : start + PREFILL_CHUNK] for _, text in rest]
        width = max(map(len, chunks))
        ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=device)
        lengths = torch.tensor([len(chunk) for chunk in chunks], device=device)
        where = [slot for slot, _ in rest]
        last = _last_logits(model, ids, cache, torch.tensor(where, device=device), lengths)
        # A slot's entry is overwritten until its text ends.
        logits.update(zip(where, last, strict=True))
    return torch.stack([logits[slot] for slot in slots])


def check_logprob(logprob: float, dtype: torch.dtype, whose: str = "model") -> None:
    """Refuse a draw from logits that are no numbers.

    Raises:
        UserError: for NaN.
    """
    if math.isnan(logprob):
        raise UserError(
            f"the {whose}'s logits are NaN or infinite in {dtype}: "
            + ("use float32" if dtype.itemsize < 4 else "its weights are damaged")
        )


def _last_logits(
    model: GPT2, ids: Tensor, cache: KVCache, slots: Tensor, lengths: Tensor | None = None
) -> Tensor:
    output = model(ids, lengths=lengths, cache=cache, slots=slots, logits_for="last")
    assert output.logits is not None
    return output.logits[:, 0]
