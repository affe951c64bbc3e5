"""Speculation writes what plain decoding writes, token by token, and says how it went."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from gptile.bench.huggingface import load_reference
from gptile.model import drafting, speculative
from gptile.model.drafting import DraftModel, PromptLookup, check_vocabulary, look_up
from gptile.model.errors import UserError
from gptile.model.generation import Completion, Row, generate, stream
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingBatch, SamplingParams
from gptile.model.speculative import Propose, Speculation, Statistics
from gptile.model.tokenizer import Tokenizer
from gptile.weights import save_checkpoint

PARAMS = {
    "greedy": SamplingParams(seed=0, temperature=0),
    "sampled": SamplingParams(seed=1),
    "cool": SamplingParams(seed=2, temperature=0.6),
    "filters": SamplingParams(seed=3, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "penalty": SamplingParams(seed=4, temperature=0.7, repetition_penalty=1.4),
    "greedy, penalty": SamplingParams(seed=0, temperature=0, repetition_penalty=1.2),
}
PROMPTS = [
    "ROMEO:",
    "What is the city but the people?\nThe people are the city.\n",
    "",
    "A",
    "O, O!",
]
SMALL_PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1], [60, 0, 60], [9] * 12, [7, 8]]


def noisy(model: GPT2, share: float = 0.2) -> GPT2:
    """A copy with noise of that share of each parameter's spread: right now and then."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.std() * share)
    return model


def equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert dataclasses.replace(one, logprobs=other.logprobs) == other


def check(
    model: GPT2, prompts: Any, params: Any, speculate: Speculation, **keywords: Any
) -> Statistics:
    """The text is the plain text, and the counts add up."""
    expected = generate(model, prompts, params, **keywords)
    found = generate(model, prompts, params, speculate=speculate, **keywords)
    equal(found, expected)
    stats = speculate.stats
    # The first token of each comes from its prompt.
    assert stats.tokens == sum(c.n_new_tokens - 1 for c in found)
    assert 0 <= stats.tokens - stats.accepted <= stats.steps <= stats.tokens
    assert stats.accepted <= stats.drafted <= stats.steps * speculate.n_tokens
    return stats


@pytest.fixture(scope="module")
def drafts(demo: tuple[GPT2, Tokenizer], small_model: Callable) -> dict[str, Callable]:
    """Ways to draft for the demo, by name."""
    model, tokenizer = demo
    torch.manual_seed(0)
    stranger = small_model(vocab_size=2048, n_positions=256)
    return {
        "itself": lambda: DraftModel(model, tokenizer=tokenizer),
        "noisy": lambda: DraftModel(noisy(model), tokenizer=tokenizer),
        "stranger": lambda: DraftModel(stranger, 3),
        "lookup": PromptLookup,
    }


class TestTheSameText:
    @pytest.mark.parametrize("params", PARAMS)
    @pytest.mark.parametrize("draft", ["itself", "noisy", "stranger", "lookup"])
    def test_of_one_prompt(
        self, demo: tuple[GPT2, Tokenizer], drafts: dict, draft: str, params: str
    ) -> None:
        model, tokenizer = demo
        asked = dataclasses.replace(PARAMS[params], max_new_tokens=41)
        stats = check(model, PROMPTS[1], asked, drafts[draft](), tokenizer=tokenizer)
        if draft == "itself":
            # 40 tokens in eights of four drafted and one drawn.
            assert stats == Statistics(steps=8, tokens=40, drafted=32, accepted=32)
            assert (stats.acceptance_rate, stats.tokens_per_step) == (1, 5)
        elif draft == "noisy":
            assert 0.05 < stats.acceptance_rate < 0.95
            assert 1.2 < stats.tokens_per_step < 4.5
        elif draft == "stranger":
            assert stats.acceptance_rate < 0.1
        else:
            assert stats.drafted > 0

    @pytest.mark.parametrize("draft", ["itself", "noisy", "stranger", "lookup"])
    def test_of_a_ragged_batch_with_samples_and_budgets(
        self, demo: tuple[GPT2, Tokenizer], drafts: dict, draft: str
    ) -> None:
        model, tokenizer = demo
        asked = [
            dataclasses.replace(params, max_new_tokens=1 + 7 * index, n=1 + index % 3)
            for index, params in enumerate(PARAMS.values())
        ][: len(PROMPTS)]
        stats = check(model, PROMPTS, asked, drafts[draft](), tokenizer=tokenizer)
        assert (stats.acceptance_rate == 1) == (draft == "itself")

    @pytest.mark.parametrize("draft", ["itself", "noisy", "lookup"])
    def test_to_the_end_of_the_context(self, small_model: Callable, draft: str) -> None:
        model = small_model()
        speculate = {
            "itself": DraftModel(model, 5),
            "noisy": DraftModel(noisy(model), 5),
            "lookup": PromptLookup(5),
        }[draft]
        for params in (PARAMS["greedy"], PARAMS["sampled"]):
            check(model, SMALL_PROMPTS, params, copy.deepcopy(speculate))
        (full,) = generate(model, [[1] * 31], PARAMS["greedy"], speculate=speculate)
        assert len(full.ids) == 1

    @pytest.mark.parametrize("room", [1, 8, 12, 13, 20])
    def test_where_the_draft_has_a_smaller_context(self, small_model: Callable, room: int) -> None:
        model = small_model()
        draft = small_model(n_positions=room)
        with torch.no_grad():
            for mine, theirs in zip(draft.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs[: len(mine)])
        params = SamplingParams(seed=1, n=2)
        stats = check(model, SMALL_PROMPTS, params, DraftModel(draft, 3))
        # All that it drafts is right, and it drafts up to its last position and no further.
        assert stats.accepted == stats.drafted
        assert (stats.drafted > 0) == (room > 1)

    def test_with_stop_strings_in_an_accepted_run(
        self, demo: tuple[GPT2, Tokenizer], drafts: dict
    ) -> None:
        model, tokenizer = demo
        params = SamplingParams(seed=3, max_new_tokens=60)
        (free,) = generate(model, "ROMEO:", params, tokenizer=tokenizer)
        dropped = 0
        for start in range(10, 22):
            stopping = dataclasses.replace(params, stop=(free.text[start : start + 3],))
            for name in ("itself", "lookup"):
                stats = check(model, "ROMEO:", stopping, drafts[name](), tokenizer=tokenizer)
            (cut,) = generate(model, "ROMEO:", stopping, tokenizer=tokenizer)
            assert cut.finish_reason == "stop"
            speculate = drafts["itself"]()
            stats = check(model, "ROMEO:", stopping, speculate, tokenizer=tokenizer)
            dropped += stats.drafted - stats.accepted
        assert dropped > 0  # some stop came before the end of what was drafted and right

    def test_with_end_of_text_in_an_accepted_run(self, model: GPT2) -> None:
        free = generate(model, SMALL_PROMPTS, PARAMS["sampled"])
        for at in range(1, 8):
            params = dataclasses.replace(PARAMS["sampled"], stop_token_ids=(free[1].ids[at], 60))
            check(model, SMALL_PROMPTS, params, DraftModel(model))
            check(model, SMALL_PROMPTS, params, PromptLookup())

    def test_streamed(self, demo: tuple[GPT2, Tokenizer], drafts: dict) -> None:
        model, tokenizer = demo
        params = SamplingParams(seed=3, max_new_tokens=30, n=2, stop=("\n\n",))
        asked: tuple = (model, PROMPTS[:3], params)
        plain = list(stream(*asked, tokenizer=tokenizer))
        speculate = drafts["noisy"]()
        found = list(stream(*asked, tokenizer=tokenizer, speculate=speculate))
        assert len(found) == len(plain)
        for key in itertools.product(range(3), range(2)):
            one, other = (
                [
                    (event.id, event.text, event.finish_reason)
                    for event in events
                    if (event.prompt_index, event.sample_index) == key
                ]
                for events in (found, plain)
            )
            assert one == other

    def test_two_streams_at_a_time_with_one_drafter(self, model: GPT2) -> None:
        speculate = DraftModel(noisy(model))
        seeds = (1, 2)
        streams = [
            stream(model, [[3]], SamplingParams(seed=seed), speculate=speculate) for seed in seeds
        ]
        found = list(zip(*streams, strict=True))
        for index, seed in enumerate(seeds):
            (expected,) = generate(model, [[3]], SamplingParams(seed=seed))
            assert [events[index].id for events in found] == expected.ids

    def test_with_padded_rows_of_the_vocabulary_in_the_prompt(
        self, demo: tuple[GPT2, Tokenizer], small_model: Callable
    ) -> None:
        _, tokenizer = demo
        model = small_model(vocab_size=tokenizer.n_vocab + 7)
        padding = tokenizer.n_vocab + 3
        prompt = [4, padding, 5, padding, 4]  # the look-up finds an id that no text has
        params = SamplingParams(seed=1, repetition_penalty=1.2)
        stats = check(model, [prompt], params, PromptLookup(), tokenizer=tokenizer)
        assert stats.steps > 0
        draft = small_model(vocab_size=tokenizer.n_vocab)
        check(model, [[4, 5]], params, DraftModel(draft, tokenizer=tokenizer), tokenizer=tokenizer)
        with pytest.raises(UserError, match=rf"id {padding}.*pads.*2048"):
            generate(
                model,
                [prompt],
                params,
                tokenizer=tokenizer,
                speculate=DraftModel(draft, tokenizer=tokenizer),
            )

    @settings(deadline=None, max_examples=40)
    @given(
        seed=st.integers(0, 2**63 - 1),
        temperature=st.sampled_from([0, 0.3, 1, 3]),
        top_k=st.integers(0, 62),
        top_p=st.floats(0, 1),
        min_p=st.sampled_from([0, 0, 0.1]),
        penalty=st.sampled_from([1, 1, 0.5, 1.7]),
        n=st.integers(1, 2),
        n_tokens=st.integers(1, 9),
        share=st.sampled_from([None, 0, 0.1, 0.5]),
        prompts=st.lists(
            st.lists(st.integers(0, 60), min_size=1, max_size=31), min_size=1, max_size=3
        ),
    )
    def test_whatever_is_asked(
        self,
        double: GPT2,
        seed: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        penalty: float,
        n: int,
        n_tokens: int,
        share: float | None,
        prompts: list[list[int]],
    ) -> None:
        params = SamplingParams(
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            n=n,
        )
        speculate = (
            PromptLookup(n_tokens) if share is None else DraftModel(noisy(double, share), n_tokens)
        )
        check(double, prompts, params, speculate)


@pytest.fixture(scope="module")
def double(small_model: Callable) -> GPT2:
    """In fp64, where a draw on the boundary of two tokens does not occur."""
    torch.manual_seed(0)
    return small_model(torch.float64)


def test_greedy_text_is_that_of_transformers_assisted_by_the_same_draft(
    small_model: Callable, tmp_path: Path
) -> None:
    model = small_model(n_positions=64)
    draft = noisy(model)
    for one, name in ((model, "target"), (draft, "draft")):
        save_checkpoint(one, tmp_path / name)
    target, assistant = (
        load_reference(tmp_path / name, torch.float32) for name in ("target", "draft")
    )
    speculate = DraftModel(draft)
    for prompt in SMALL_PROMPTS:
        ids = torch.tensor([prompt])
        settings: dict = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}
        expected = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **settings
        )
        params = SamplingParams(temperature=0, max_new_tokens=30)
        (found,) = generate(model, [prompt], params, speculate=speculate)
        assert found.ids == expected[0, len(prompt) :].tolist()
    assert 0 < speculate.stats.accepted < speculate.stats.drafted


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


class TestDistribution:
    """Of three tokens after a prompt, against the probabilities of every possible text."""

    PARAMS = SamplingParams(
        seed=11, temperature=1.3, top_k=4, max_new_tokens=3, n=6000, stop_token_ids=()
    )
    PROMPT = (1, 2)

    @pytest.fixture
    def tiny(self, small_model: Callable) -> tuple[GPT2, GPT2]:
        sizes: dict = {"vocab_size": 5, "n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 8}
        target, draft = (small_model(torch.float64, **sizes) for _ in range(2))
        with torch.no_grad():
            for model in (target, draft):
                model.ln_f.weight.mul_(0.3)  # every token has a chance
        return target, draft

    def probabilities(self, model: GPT2) -> np.ndarray:
        """``[5, 5, 5]``, by the definitions of temperature and top-k."""
        texts = list(itertools.product(range(5), repeat=3))
        ids = torch.tensor([[*self.PROMPT, *text] for text in texts])
        with torch.no_grad():
            logits = model(ids).logits[:, len(self.PROMPT) - 1 : -1].numpy()
        kept = logits >= np.sort(logits, -1)[..., -self.PARAMS.top_k, None]
        weights = np.exp(logits / self.PARAMS.temperature) * kept
        chances = weights / weights.sum(-1, keepdims=True)
        steps = np.take_along_axis(chances, np.array(texts)[..., None], -1)
        return steps.prod(1).reshape(5, 5, 5)

    def check(self, models: tuple[GPT2, GPT2]) -> None:
        target, draft = models
        speculate = DraftModel(draft, 2)
        found = generate(target, [self.PROMPT], self.PARAMS, speculate=speculate)
        assert 0.1 < speculate.stats.acceptance_rate < 0.9
        counts = np.zeros((5, 5, 5))
        for completion in found:
            counts[tuple(completion.ids)] += 1
        expected = self.probabilities(target) * self.PARAMS.n
        assert counts[expected == 0].sum() == 0
        often = expected >= 5
        cells = [*zip(counts[often], expected[often], strict=True)]
        cells.append((counts[~often].sum(), expected[~often].sum()))
        assert expected[often].sum() > 0.9 * self.PARAMS.n
        observed, due = np.array([cell for cell in cells if cell[1] > 0]).T
        assert chisquare(observed, due).pvalue > 1e-3

    def test_is_the_targets(self, tiny: tuple[GPT2, GPT2]) -> None:
        self.check(tiny)

    def test_what_is_accepted_unchecked_has_another(
        self, tiny: tuple[GPT2, GPT2], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speculative, "_kept", lambda draft, draws: len(draws))
        with pytest.raises(AssertionError):
            self.check(tiny)


def _seen_only(wide: bool) -> Callable:
    """Marks either what a pass's positions have seen or what the texts have, not both."""
    mark = speculative.mark

    def wrong(seen: Tensor | None, marks: list[tuple[int, int]]) -> None:
        if seen is not None and (len(seen) > len(SMALL_PROMPTS)) == wide:
            mark(seen, marks)

    return wrong


def _truncate_only_the_target() -> Callable:
    truncate, caches = KVCache.truncate, []

    def wrong(cache: KVCache, slot: int, length: int) -> None:
        caches.append(cache)  # the target's comes first
        if cache is caches[0]:
            truncate(cache, slot, length)

    return wrong


kept, positions = speculative._kept, speculative._positions
TARGET_FAULTS = {
    "not forgotten": (KVCache, "truncate", lambda *_: None),
    "position": (speculative, "_positions", lambda *args: [at + 1 for at in positions(*args)]),
    "unchecked": (speculative, "_kept", lambda draft, draws: len(draws)),
    "one too few": (speculative, "_kept", lambda *args: max(kept(*args) - 1, 1)),
    "bonus dropped": (
        speculative,
        "_kept",
        lambda draft, draws: min(kept(draft, draws), max(len(draft), 1)),
    ),
    "drafted not seen": (speculative, "mark", _seen_only(wide=False)),
    "text not seen": (speculative, "mark", _seen_only(wide=True)),
}
DRAFT_FAULTS = {
    "not forgotten": (KVCache, "truncate", _truncate_only_the_target()),
    "not seen": (drafting, "mark", lambda *_: None),
}


class TestFaultsAreSeen:
    def check(self, model: GPT2) -> None:
        for params in (PARAMS["sampled"], PARAMS["greedy, penalty"]):
            check(model, SMALL_PROMPTS, params, DraftModel(noisy(model), 3))
        stats = check(model, [[1]], SamplingParams(seed=1, max_new_tokens=13), DraftModel(model, 3))
        assert stats.tokens_per_step == 4

    def test_none_without_one(self, model: GPT2) -> None:
        self.check(model)

    @pytest.mark.parametrize("fault", TARGET_FAULTS)
    def test_in_what_is_kept(
        self, model: GPT2, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        monkeypatch.setattr(*TARGET_FAULTS[fault])
        with pytest.raises((AssertionError, UserError)):
            self.check(model)

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
