"""What is drafted, by a model and by a look back, and what cannot draft."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptile.model import drafting
from gptile.model.drafting import DraftModel, PromptLookup, check_vocabulary, look_up
from gptile.model.errors import UserError
from gptile.model.generation import Row, generate, stream
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingBatch, SamplingParams
from gptile.model.speculative import Propose, Statistics
from gptile.model.tokenizer import Tokenizer
from tests.model.speculation_checks import PARAMS, SMALL_PROMPTS, check, noisy


class Watched(DraftModel):
    """Remembers every draft with the row it was made for."""

    def begin(self, rows: list[Row], n_vocab: int) -> Propose:
        self.made: list[tuple[list[int], Row, list[int]]] = []
        propose = super().begin(rows, n_vocab)

        def watched(
            rows: list[Row], slots: list[int], batch: SamplingBatch, limits: list[int]
        ) -> list[list[int]]:
            drafts = propose(rows, slots, batch, limits)
            for row, draft, limit in zip(rows, drafts, limits, strict=True):
                assert len(draft) == limit
                self.made.append((row.prompt + row.ids, row, draft))
            return drafts

        return watched


def check_drafts(model: GPT2, draft: GPT2) -> None:
    """A draft is what the draft model's network by itself writes after the same text."""
    network = copy.deepcopy(draft)
    network.ops = model.ops
    params = [PARAMS[name] for name in ("sampled", "greedy", "filters", "penalty", "cool")]
    speculate = Watched(draft)
    generate(model, SMALL_PROMPTS, params, speculate=speculate)
    assert 0 < speculate.stats.accepted < speculate.stats.drafted
    for text, row, drafted in speculate.made:
        if drafted:
            alone = dataclasses.replace(row.params, seed=row.seed, max_new_tokens=len(drafted))
            assert generate(network, [text], alone)[0].ids == drafted


class TestDrafts:
    def test_are_what_the_draft_model_writes_alone(self, model: GPT2) -> None:
        check_drafts(model, noisy(model))

    def test_may_come_from_a_decode_step(self, model: GPT2) -> None:
        draft, sizes = noisy(model), []

        def step(ids: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
            sizes.append(len(ids))
            output = draft(ids.unsqueeze(1), cache=cache, slots=slots)
            assert output.logits is not None
            return output.logits[:, 0]

        plain, stepped = DraftModel(draft), DraftModel(draft, decode_step=step)
        for speculate in (plain, stepped):
            check(model, SMALL_PROMPTS, PARAMS["sampled"], speculate)
        assert stepped.stats == plain.stats
        assert len(sizes) > 20

    def test_each_prompt_is_computed_once(self, model: GPT2) -> None:
        fed = []
        draft = copy.deepcopy(model)
        draft.register_forward_pre_hook(
            lambda _, args, keywords: fed.append(keywords["lengths"].tolist()), with_kwargs=True
        )
        generate(model, [[1] * 9, [2] * 4], SamplingParams(n=3), speculate=DraftModel(draft))
        assert fed[0] == [9, 4]
        assert all(max(lengths) <= 2 for lengths in fed[1:])


class TestLookUp:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ([1], []),
            ([1, 2, 3], []),
            ([1, 2, 3, 1], [2, 3, 1]),
            ([7, 1, 2, 8, 1, 2], [8, 1, 2]),
            ([1, 2, 8, 3, 2, 9, 1, 2], [8, 3, 2]),  # the longer n-gram, not the later token
            ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the later of two
            ([5, 5], [5, 5, 5]),  # goes on with the period
            ([1, 2, 1, 2], [1, 2, 1]),
        ],
    )
    def test_by_hand(self, text: list[int], expected: list[int]) -> None:
        assert look_up(text, 3, max_ngram=3) == expected

    @given(
        text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
        n_tokens=st.integers(0, 6),
        max_ngram=st.integers(1, 5),
    )
    def test_is_its_definition(self, text: list[int], n_tokens: int, max_ngram: int) -> None:
        expected: list[int] = []
        for n in range(min(max_ngram, len(text) - 1), 0, -1):
            starts = [s for s in range(len(text) - n) if text[s : s + n] == text[-n:]]
            if starts:
                longer = list(text)
                for t in range(n_tokens):
                    longer.append(longer[starts[-1] + n + t])
                expected = longer[len(text) :]
                break
        assert look_up(text, n_tokens, max_ngram) == expected

    def test_counts_of_a_text_that_repeats_itself(self, model: GPT2) -> None:
        with torch.no_grad():  # a head that makes one id certain
            model.ln_f.weight.zero_()
            model.ln_f.bias.copy_(model.wte.weight[17] * 100)
        params = SamplingParams(seed=0, temperature=0, max_new_tokens=20)
        stats = check(model, [[5]], params, PromptLookup(4))
        # After the prompt's token: one without a draft, thrice 4 + 1, then 2 + 1 of the budget.
        assert stats == Statistics(steps=5, tokens=19, drafted=14, accepted=14)


def _truncate_only_the_target() -> Callable:
    truncate, caches = KVCache.truncate, []

    def wrong(cache: KVCache, slot: int, length: int) -> None:
        caches.append(cache)  # the target's comes first
        if cache is caches[0]:
            truncate(cache, slot, length)

    return wrong


DRAFT_FAULTS = {
    "not forgotten": (KVCache, "truncate", _truncate_only_the_target()),
    "not seen": (drafting, "mark", lambda *_: None),
}


class TestFaultsAreSeen:
    @pytest.mark.parametrize("fault", DRAFT_FAULTS)
    def test_in_what_is_drafted(
        self, model: GPT2, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        monkeypatch.setattr(*DRAFT_FAULTS[fault])
        with pytest.raises((AssertionError, UserError)):
            check_drafts(model, noisy(model))

    def test_in_the_drafts_random_numbers(self, model: GPT2) -> None:
        draft = noisy(model)
        sample = draft.ops.sample
        draft.ops = draft.ops.replace(
            sample=lambda logits, *, positions, **columns: sample(
                logits, positions=positions - 1, **columns
            )
        )
        with pytest.raises(AssertionError):
            check_drafts(model, draft)


class TestRefused:
    GREEDY = SamplingParams(seed=0, temperature=0)

    def test_another_vocabulary(
        self, demo: tuple[GPT2, Tokenizer], model: GPT2, small_model: Callable
    ) -> None:
        target, tokenizer = demo
        for draft in (model, small_model(vocab_size=2049)):
            speculate = DraftModel(draft)
            with pytest.raises(UserError, match=rf"{draft.config.vocab_size} ids.*2048"):
                stream(target, "a", self.GREEDY, tokenizer=tokenizer, speculate=speculate)

    def test_another_tokeniser(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        ranks = {tokenizer.token_bytes(id): id for id in range(tokenizer.n_vocab - 1)}
        end = tokenizer.n_vocab - 1
        same = Tokenizer(ranks, {"<|endoftext|>": end})
        check_vocabulary(model.config, same, model.config, tokenizer)
        shorter = Tokenizer(ranks, {})
        first, second = tokenizer.token_bytes(300), tokenizer.token_bytes(301)
        swapped = Tokenizer({**ranks, first: 301, second: 300}, {"<|endoftext|>": end})
        for other, words in ((shorter, "2047 ids.*2048"), (swapped, "id 300 is")):
            with pytest.raises(UserError, match=words):
                generate(
                    model,
                    "a",
                    self.GREEDY,
                    tokenizer=tokenizer,
                    speculate=DraftModel(model, tokenizer=other),
                )
        small = dataclasses.replace(model.config, vocab_size=2000)
        with pytest.raises(UserError, match=r"2000 ids.*2048"):
            check_vocabulary(small, tokenizer, model.config, tokenizer)

    def test_another_device(self, model: GPT2) -> None:
        draft = copy.deepcopy(model).to("meta")
        with pytest.raises(UserError, match=r"meta.*cpu"):
            stream(model, [[1]], self.GREEDY, speculate=DraftModel(draft))

    def test_a_decode_step_beside_it(self, model: GPT2) -> None:
        with pytest.raises(UserError, match=r"decode_step.*speculate"):
            stream(
                model,
                [[1]],
                self.GREEDY,
                decode_step=lambda ids, cache, slots: ids,
                speculate=PromptLookup(),
            )

    def test_a_draft_in_training_mode(self, model: GPT2) -> None:
        with pytest.raises(ValueError, match=r"draft.*eval"):
            DraftModel(copy.deepcopy(model).train())

    @pytest.mark.parametrize("n", [0, -1, 1.5, True, "4", None])
    def test_counts_that_are_none(self, model: GPT2, n: Any) -> None:
        with pytest.raises(UserError, match="n_tokens"):
            DraftModel(model, n)
        with pytest.raises(UserError, match="n_tokens"):
            PromptLookup(n)
        with pytest.raises(UserError, match="max_ngram"):
            PromptLookup(4, n)

    @pytest.mark.parametrize("whose", ["model", "draft model"])
    def test_logits_that_are_no_numbers(self, model: GPT2, whose: str) -> None:
        draft = copy.deepcopy(model)
        with torch.no_grad():
            (model if whose == "model" else draft).ln_f.bias[0] = torch.nan
        with pytest.raises(UserError, match=f"the {whose}'s logits are NaN"):
            generate(model, [[1]], self.GREEDY, speculate=DraftModel(draft))
