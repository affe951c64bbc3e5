"""Speculation writes what plain decoding writes, token by token, and says how it went."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare
from torch import Tensor

from gptile.bench.huggingface import load_reference
from gptile.kernels import Ops
from gptile.model import speculative
from gptile.model.drafting import DraftModel, PromptLookup
from gptile.model.errors import UserError
from gptile.model.generation import generate, stream
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.model.speculative import Statistics
from gptile.model.tokenizer import Tokenizer
from gptile.weights import save_checkpoint
from tests.model.speculation_checks import PARAMS, SMALL_PROMPTS, check, equal, noisy

PROMPTS = [
    "ROMEO:",
    "What is the city but the people?\nThe people are the city.\n",
    "",
    "A",
    "O, O!",
]


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
            check(model, "ROMEO:", stopping, PromptLookup(), tokenizer=tokenizer)
            (cut,) = generate(model, "ROMEO:", stopping, tokenizer=tokenizer)
            assert cut.finish_reason == "stop"
            stats = check(model, "ROMEO:", stopping, drafts["itself"](), tokenizer=tokenizer)
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

    def test_with_the_kernels(self, model: GPT2) -> None:
        target, draft = copy.deepcopy(model), noisy(model)
        for one in (target, draft):
            for module in one.modules():
                if hasattr(module, "ops"):
                    module.ops = Ops.triton()
        params = SamplingParams(seed=1, temperature=0.5, repetition_penalty=1.1, max_new_tokens=5)
        speculate = DraftModel(draft, 2)
        found = generate(target, SMALL_PROMPTS[:2], params, speculate=speculate)
        equal(found, generate(model, SMALL_PROMPTS[:2], params))
        assert 0 < speculate.stats.accepted < speculate.stats.drafted

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

    def chances(self, model: GPT2, prompt: tuple[int, ...]) -> np.ndarray:
        """Of the token after the prompt, by the definitions of temperature and top-k."""
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].numpy()
        kept = logits >= np.sort(logits)[-self.PARAMS.top_k]
        weights = np.exp(logits / self.PARAMS.temperature) * kept
        return weights / weights.sum()

    def probabilities(self, model: GPT2) -> np.ndarray:
        """``[5, 5, 5]``, of every text."""
        found = np.empty((5, 5, 5))
        first = self.chances(model, self.PROMPT)
        for a in range(5):
            second = self.chances(model, (*self.PROMPT, a))
            for b in range(5):
                found[a, b] = first[a] * second[b] * self.chances(model, (*self.PROMPT, a, b))
        return found

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

    def test_draws_agree_as_often_as_their_intervals_overlap(self, tiny: tuple[GPT2, GPT2]) -> None:
        target, draft = tiny
        speculate = DraftModel(draft, 1)
        generate(target, [self.PROMPT], self.PARAMS, speculate=speculate)
        # One token is drafted for each sample, its second; for the third, nothing may be.
        stats = speculate.stats
        assert stats.drafted == self.PARAMS.n
        rate, papers = 0.0, 0.0
        for first, chance in enumerate(self.chances(target, self.PROMPT)):
            p, q = (self.chances(model, (*self.PROMPT, first)) for model in tiny)
            ends = np.minimum(p.cumsum(), q.cumsum())
            starts = np.maximum(p.cumsum() - p, q.cumsum() - q)
            rate += chance * np.maximum(ends - starts, 0).sum()
            papers += chance * np.minimum(p, q).sum()
        assert binomtest(stats.accepted, stats.drafted, rate).pvalue > 1e-3
        assert binomtest(stats.accepted, stats.drafted, papers).pvalue < 1e-6
        assert stats.acceptance_rate < papers

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
