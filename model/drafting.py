"""What drafts tokens for :mod:`gptile.model.speculative`: a look back at the text, or a model."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.generation import DecodeStep, Row, check_logprob, feed
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingBatch, is_id
from gptile.model.speculative import Propose, Speculation, mark
from gptile.model.tokenizer import Tokenizer


class PromptLookup(Speculation):
    """Drafts what followed when the text last said the same: no second model, and much accepted
    where a text repeats itself or its prompt (summaries, corrections, code). Saxena 2023
    (https://github.com/apoorvumang/prompt-lookup-decoding)."""

    def __init__(self, n_tokens: int = 7, max_ngram: int = 3) -> None:
        """
        Args:
            n_tokens: to draft a step. With one more token a row's pass is still one that the
                kernels of a decode step take (8 queries).
            max_ngram: how many of the last tokens at most must have stood together before.
        """
        super().__init__(n_tokens)
        if not is_id(max_ngram) or max_ngram < 1:
            raise UserError(f"max_ngram must be 1 or more, got {max_ngram!r}")
        self.max_ngram = max_ngram

    def check(self, target: GPT2, rows: list[Row], tokenizer: Tokenizer | None) -> None:
        """Any will do."""

    def begin(self, rows: list[Row], n_vocab: int) -> Propose:
        def propose(
            rows: list[Row], slots: list[int], batch: SamplingBatch, limits: list[int]
        ) -> list[list[int]]:
            drafts = []
            for row, limit in zip(rows, limits, strict=True):
                draft = look_up(row.prompt + row.ids, limit, self.max_ngram)
                # A prompt may hold ids that no text does: rows that pad the vocabulary.
                unusable = (n for n, id in enumerate(draft) if id >= n_vocab)
                drafts.append(draft[: next(unusable, len(draft))])
            return drafts

        return propose


def look_up(text: Sequence[int], n_tokens: int, max_ngram: int) -> list[int]:
    """The ``n_tokens`` ids after the longest n-gram, of up to ``max_ngram`` tokens, that ends the
    text and stands in it before; the latest of several; [] if not even the last token does.

    Where fewer follow, the text repeats itself with that period, and the draft goes on so.
    """
    tokens = np.array(text)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    for n in range(1, min(max_ngram, len(tokens))):
        longer = ends[ends >= n]
        longer = longer[tokens[longer - n] == tokens[-1 - n]]
        if not len(longer):
            break
        ends = longer
    if not len(ends):
        return []
    followed = tokens[ends[-1] + 1 :].tolist()
    return [followed[t % len(followed)] for t in range(n_tokens)]


class DraftModel(Speculation):
    """Drafts with a smaller model of the same vocabulary, such as gpt2 for gpt2-xl.

    It samples with the parameters and the random numbers of the target, from a cache of its own.
    Where a text outgrows its context, nothing more is drafted.
    """

    def __init__(
        self,
        model: GPT2,
        n_tokens: int = 4,
        *,
        tokenizer: Tokenizer | None = None,
        decode_step: DecodeStep | None = None,
    ) -> None:
        """
        Args:
            model: in evaluation mode, on the target's device.
            n_tokens: to draft a step.
            tokenizer: the draft's; to compare with the target's.
            decode_step: computes one more token a row in place of the model.

        Raises:
            ValueError: for a model in training mode.
        """
        super().__init__(n_tokens)
        if model.training:
            raise ValueError("the draft model is in training mode; call model.eval()")
        self.model = model
        self.tokenizer = tokenizer
        self.decode_step = decode_step

    def check(self, target: GPT2, rows: list[Row], tokenizer: Tokenizer | None) -> None:
        check_vocabulary(self.model.config, self.tokenizer, target.config, tokenizer)
        mine, theirs = self.model.wte.weight.device, target.wte.weight.device
        if mine != theirs:
            raise UserError(f"the draft model is on {mine}, the target on {theirs}: move one")
        highest = max(max(row.prompt) for row in rows)
        if highest >= self.model.config.vocab_size:
            raise UserError(
                f"the prompt has the id {highest}, which only pads the target's vocabulary and "
                f"which the draft model's, of {self.model.config.vocab_size} ids, lacks"
            )

    def begin(self, rows: list[Row], n_vocab: int) -> Propose:
        return _Drafting(self.model, self.decode_step, rows, n_vocab).propose


class _Drafting:
    """A draft model at work on some rows: its cache holds, in each row's slot, a beginning of the
    text, and then what it drafted last."""

    def __init__(
        self, model: GPT2, decode_step: DecodeStep | None, rows: list[Row], n_vocab: int
    ) -> None:
        weight = model.wte.weight
        self.model, self.decode_step, self.n_vocab = model, decode_step, n_vocab
        self.device = weight.device
        # The last token of a text, or of a draft, is never fed.
        longest = max(len(row.prompt) + row.budget - 1 for row in rows)
        max_len = min(longest, model.config.n_positions)
        self.cache = KVCache(
            model.config, len(rows), max_len, dtype=weight.dtype, device=self.device
        )
        # Each prompt is computed once, if the context has room for it.
        firsts = [
            slot
            for slot, row in enumerate(rows)
            if row.sample_index == 0 and len(row.prompt) <= max_len
        ]
        if firsts:
            feed(model, self.cache, firsts, [rows[slot].prompt for slot in firsts])
        for slot, row in enumerate(rows):
            if row.sample_index > 0:
                self.cache.copy(slot - row.sample_index, slot)

    def propose(
        self, rows: list[Row], slots: list[int], batch: SamplingBatch, limits: list[int]
    ) -> list[list[int]]:
        texts = [row.prompt + row.ids for row in rows]
        # The text and all but the last drafted token must fit the cache.
        room = [self.cache.max_len - len(text) + 1 for text in texts]
        limits = [min(pair) for pair in zip(limits, room, strict=True)]
        drafts: list[list[int]] = [[] for _ in rows]
        active = [index for index, limit in enumerate(limits) if limit > 0]
        held = self.cache.lengths.tolist()
        rest = {}
        for index in active:
            # What is held beyond the text but its last token was drafted and rejected.
            known = min(held[slots[index]], len(texts[index]) - 1)
            self.cache.truncate(slots[index], known)
            rest[index] = texts[index][known:]
        batch = batch.take(torch.tensor(active, dtype=torch.int64, device=self.device))
        while active:
            logits = self.step([slots[i] for i in active], [rest[i] for i in active])
            positions = torch.tensor(
                [len(texts[i]) + len(drafts[i]) for i in active], device=self.device
            )
            ids, logprobs = self.model.ops.sample(
                logits[:, : self.n_vocab], positions=positions, **vars(batch)
            )
            for n, (index, id, logprob) in enumerate(
                zip(active, ids.tolist(), logprobs.tolist(), strict=True)
            ):
                check_logprob(logprob, logits.dtype, "draft model")
                drafts[index].append(id)
                rest[index] = [id]
                mark(batch.seen, [(n, id)])
            going = [n for n, index in enumerate(active) if len(drafts[index]) < limits[index]]
            if len(going) < len(active):
                active = [active[n] for n in going]
                batch = batch.take(torch.tensor(going, dtype=torch.int64, device=self.device))
        return drafts

    def step(self, slots: list[int], texts: list[list[int]]) -> Tensor:
        """The logits after these continuations of the slots, ``[len(slots), V]``."""
        if self.decode_step is None or any(len(text) > 1 for text in texts):
            return feed(self.model, self.cache, slots, texts)
        ids = torch.tensor([text[0] for text in texts], device=self.device)
        return self.decode_step(ids, self.cache, torch.tensor(slots, device=self.device))


def check_vocabulary(
    draft: GPT2Config,
    draft_tokenizer: Tokenizer | None,
    target: GPT2Config,
    tokenizer: Tokenizer | None,
) -> None:
    """Refuse a draft whose ids are not the target's.

    With both tokenisers, theirs are compared: the models may pad their vocabularies differently.
    Else the models' sizes must be the same, as nothing tells padding from other tokens.

    Raises:
        UserError: naming what differs.
    """
    if draft_tokenizer is None or tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise UserError(
                f"the draft model has a vocabulary of {draft.vocab_size} ids, the target one of "
                f"{target.vocab_size}; if that is only padding, give both tokenisers"
            )
        return
    if draft_tokenizer.n_vocab != tokenizer.n_vocab:
        raise UserError(
            f"the draft model's tokeniser has {draft_tokenizer.n_vocab} ids, the target's "
            f"{tokenizer.n_vocab}: a draft must have the target's vocabulary"
        )
    if (id := draft_tokenizer.first_difference(tokenizer)) is not None:
        mine, theirs = (t.token_bytes(id) for t in (draft_tokenizer, tokenizer))
        raise UserError(
            f"id {id} is {mine!r} in the draft model's tokeniser and {theirs!r} in the target's: a "
            "draft must have the target's vocabulary"
        )
    if draft.vocab_size < tokenizer.n_vocab:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} ids, its tokeniser "
            f"{tokenizer.n_vocab}"
        )
