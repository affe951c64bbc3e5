"""Generation against transformers' ``generate`` and against itself in other company."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gptile.bench.huggingface import import_transformers, load_reference
from gptile.model import generation
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.generation import generate, stream, token_budget
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import ContextLengthError
from gptile.model.sampling import SamplingParams, sample_seeds
from gptile.model.tokenizer import Tokenizer
from gptile.weights import save_checkpoint

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [60, 0, 60], [9] * 12]
GREEDY = SamplingParams(temperature=0)


def with_config(model: GPT2, **fields: object) -> GPT2:
    model.config = dataclasses.replace(model.config, **fields)
    return model


def reference_greedy(model: GPT2, prompt: list[int], path: Path, **settings: object) -> list[int]:
    if not path.exists():
        save_checkpoint(model, path)
    reference = load_reference(path, torch.float32)
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


class TestAgainstTransformers:
    @pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.6}])
    def test_greedy_ids_of_a_ragged_batch(
        self, model: GPT2, tmp_path: Path, settings: dict
    ) -> None:
        params = SamplingParams(temperature=0, max_new_tokens=15, **settings)
        for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, params), strict=True):
            expected = reference_greedy(
                model, prompt, tmp_path / "model", max_new_tokens=15, **settings
            )
            assert completion.ids == expected
            assert completion.finish_reason == "length"

    @pytest.mark.parametrize("as_list", [False, True])
    def test_greedy_ids_end_with_end_of_text(
        self, model: GPT2, tmp_path: Path, as_list: bool
    ) -> None:
        free = generate(model, PROMPTS, GREEDY)
        # An id that the model does produce, somewhere inside.
        eos = free[1].ids[3]
        with_config(model, eos_token_id=(eos, 60) if as_list else eos)
        for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, GREEDY), strict=True):
            room = 32 - len(prompt)
            expected = reference_greedy(model, prompt, tmp_path / "model", max_new_tokens=room)
            assert completion.ids == expected
            ended = expected[-1] in model.config.eos_token_ids
            assert completion.finish_reason == ("stop" if ended else "length")
        assert generate(model, [PROMPTS[1]], GREEDY)[0].finish_reason == "stop"

    def test_sampled_tokens_come_from_the_set_transformers_leaves(self, model: GPT2) -> None:
        t = import_transformers()
        warpers = [t.TemperatureLogitsWarper(1.3), t.TopKLogitsWarper(12), t.TopPLogitsWarper(0.8)]
        params = SamplingParams(temperature=1.3, top_k=12, top_p=0.8, n=8, seed=1)
        for completion in generate(model, [[3, 4]], params):
            sequence = [3, 4, *completion.ids]
            logits = model(torch.tensor([sequence[:-1]])).logits[0, 1:]
            for scores, id in zip(logits, completion.ids, strict=True):
                scores = scores.unsqueeze(0)
                for warper in warpers:
                    scores = warper(None, scores)
                assert scores[0, id].isfinite()


@pytest.mark.parametrize("eos", [0, 17])
def test_end_of_text_works_for_id_zero(model: GPT2, eos: int) -> None:
    # A head that makes one id certain.
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(model.wte.weight[eos] * 100)
    with_config(model, eos_token_id=eos)
    (completion,) = generate(model, [[5]], GREEDY)
    assert (completion.ids, completion.finish_reason) == ([eos], "stop")
    params = SamplingParams(temperature=0, stop_token_ids=(), max_new_tokens=3)
    assert generate(model, [[5]], params)[0].ids == [eos] * 3


class TestEachRowAsIfAlone:
    PARAMS = (
        SamplingParams(seed=1, max_new_tokens=9),
        SamplingParams(seed=1, temperature=0.7, top_k=5),
        SamplingParams(seed=2, top_p=0.7, repetition_penalty=1.3, max_new_tokens=20),
        SamplingParams(temperature=0, max_new_tokens=11),
    )

    def test_in_any_company_and_order(self, model: GPT2) -> None:
        alone = [generate(model, [p], s)[0] for p, s in zip(PROMPTS, self.PARAMS, strict=True)]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
            together = generate(model, [PROMPTS[i] for i in order], [self.PARAMS[i] for i in order])
            for position, index in enumerate(order):
                assert together[position].ids == alone[index].ids
                assert together[position].logprobs == pytest.approx(alone[index].logprobs, abs=1e-5)
                assert together[position].prompt_index == position

    def test_beside_a_row_without_a_seed(self, model: GPT2) -> None:
        seeded, free = SamplingParams(seed=7), SamplingParams()
        alone = generate(model, [[4, 5]], seeded)[0].ids
        assert generate(model, [[1], [4, 5]], [free, seeded])[1].ids == alone

    @pytest.mark.parametrize("chunk", [1, 2, 5, 7])
    def test_whatever_the_prefill_chunk(
        self, model: GPT2, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = generate(model, PROMPTS, list(self.PARAMS))
        monkeypatch.setattr(generation, "PREFILL_CHUNK", chunk)
        chunked = generate(model, PROMPTS, list(self.PARAMS))
        assert [c.ids for c in chunked] == [c.ids for c in whole]

    def test_uncached_greedy_is_the_same(self, model: GPT2) -> None:
        for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, GREEDY), strict=True):
            ids = list(prompt)
            while len(ids) < 32:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert completion.ids == ids[len(prompt) :]


class TestSeeds:
    def test_same_seed_same_text_other_seed_other_text(self, model: GPT2) -> None:
        first, again, other = (
            generate(model, [[3]], SamplingParams(seed=seed))[0].ids for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_requests_without_a_seed_differ(self, model: GPT2) -> None:
        a, b = generate(model, [[3], [3]], SamplingParams())
        assert a.ids != b.ids
        # The seed that was drawn is reported, and reproduces the text.
        assert generate(model, [[3]], SamplingParams(seed=a.seed))[0].ids == a.ids

    def test_samples_differ_and_each_can_be_had_again(self, model: GPT2) -> None:
        samples = generate(model, [[8], [3]], SamplingParams(seed=5, n=4))
        assert [(s.prompt_index, s.sample_index) for s in samples] == [
            (p, s) for p in range(2) for s in range(4)
        ]
        assert len({tuple(s.ids) for s in samples[:4]}) == 4
        for sample in samples[4:]:
            again = generate(model, [[3]], SamplingParams(seed=sample.seed))[0]
            assert again.ids == sample.ids
        assert generate(model, [[3]], SamplingParams(seed=5))[0].ids == samples[4].ids

    def test_every_position_has_a_random_number_of_its_own(self, model: GPT2) -> None:
        with torch.no_grad():  # uniform over the vocabulary: the id shows the random number
            model.ln_f.weight.zero_()
            model.ln_f.bias.zero_()
        (completion,) = generate(model, [[3]], SamplingParams(seed=1))
        assert len(set(completion.ids)) > 15

    def test_a_text_cut_off_goes_on_as_it_would_have(self, model: GPT2) -> None:
        params = SamplingParams(seed=9)
        (whole,) = generate(model, [[3, 4]], params)
        (rest,) = generate(model, [[3, 4, *whole.ids[:7]]], params)
        assert rest.ids == whole.ids[7:]

    def test_all_64_bits_of_a_seed_count(self, model: GPT2) -> None:
        low, high = (SamplingParams(seed=s, n=2) for s in (5, 5 + 2**32))
        ids = [c.ids for p in (low, high) for c in generate(model, [[3]], p)]
        assert len({tuple(i) for i in ids}) == 4
        assert sample_seeds(low)[1] != sample_seeds(high)[1]

    @pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
    def test_sample_seeds_are_distinct_and_begin_with_the_requests(self, seed: int) -> None:
        seeds = sample_seeds(SamplingParams(seed=seed, n=100))
        assert seeds[0] == seed
        assert len(set(seeds)) == 100
        assert all(0 <= s < 2**63 for s in seeds)
        assert sample_seeds(SamplingParams(seed=seed, n=3)) == seeds[:3]


class TestContextLimit:
    def test_the_rule(self) -> None:
        assert token_budget(10, None, 32) == 22
        assert token_budget(31, 1, 32) == 1
        with pytest.raises(ContextLengthError, match=r"32 tokens.*context of 32"):
            token_budget(32, None, 32)
        with pytest.raises(ContextLengthError, match=r"10 tokens and 23.*32.*at most 22"):
            token_budget(10, 23, 32)

    @pytest.mark.parametrize("n_prompt", [1, 31])
    def test_text_fills_the_context_and_no_more(self, model: GPT2, n_prompt: int) -> None:
        (completion,) = generate(model, [[1] * n_prompt], GREEDY)
        assert completion.n_prompt_tokens + completion.n_new_tokens == 32
        assert completion.finish_reason == "length"

    def test_one_bad_request_is_refused_before_any_computation(self, model: GPT2) -> None:
        model.ops = None  # any computation would fail
        with pytest.raises(ContextLengthError):
            stream(model, [[1], [1] * 40], GREEDY)


class TestBadInput:
    @pytest.mark.parametrize("id", [-1, 61, 2**32, 1.5, True, "a", None, [1]])
    def test_ids_that_are_not(self, model: GPT2, id: object) -> None:
        with pytest.raises(UserError, match="prompt 1"):
            generate(model, [[1], [2, id]], GREEDY)

    def test_text_without_a_tokeniser(self, model: GPT2) -> None:
        with pytest.raises(UserError, match="no tokeniser"):
            generate(model, "hello")
        with pytest.raises(UserError, match="stop strings"):
            generate(model, [[1]], SamplingParams(stop="x"))

    def test_no_prompts_and_uneven_params(self, model: GPT2) -> None:
        with pytest.raises(UserError, match="no prompts"):
            generate(model, [])
        with pytest.raises(UserError, match="1 prompts but 2"):
            generate(model, [[1]], [GREEDY, GREEDY])

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("top_k", -1),
            ("top_k", 1.5),
            ("top_p", 1.1),
            ("top_p", -0.1),
            ("top_p", float("nan")),
            ("min_p", 2),
            ("repetition_penalty", 0),
            ("repetition_penalty", 1e-300),
            ("temperature", 10**400),
            ("temperature", "1"),
            ("n", 2_000_000_000),
            ("stop_token_ids", (-1,)),
            ("stop_token_ids", "12"),
            ("stop", ("\ud800",)),
            ("repetition_penalty", float("nan")),
            ("max_new_tokens", 0),
            ("max_new_tokens", -1),
            ("n", 0),
            ("n", True),
            ("seed", -1),
            ("seed", 2**63),
            ("stop", ("a", "")),
        ],
    )
    def test_parameters_out_of_range_are_named(self, field: str, value: object) -> None:
        with pytest.raises(UserError, match=field):
            SamplingParams(**{field: value})

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("temperature", [0, 0.8])
    def test_bad_logits_are_an_error_not_a_token(
        self, model: GPT2, bad: float, temperature: float
    ) -> None:
        with torch.no_grad():
            model.ln_f.bias[0] = bad
        with pytest.raises(UserError, match="weights are damaged"):
            generate(model, [[1]], SamplingParams(temperature=temperature, top_p=0.9))

    def test_a_model_in_training_mode_is_refused(self, model: GPT2) -> None:
        with pytest.raises(ValueError, match=r"model\.eval"):
            generate(model.train(), [[1]], GREEDY)


class TestFormsOfInput:
    def test_tensors_arrays_and_iterators_are_prompts(self, model: GPT2) -> None:
        (expected,) = generate(model, [[1, 2, 3]], GREEDY)
        for one in (
            [1, 2, 3],
            (1, 2, 3),
            torch.tensor([1, 2, 3]),
            torch.tensor([[1, 2, 3]]),
            np.array([1, 2, 3], dtype=np.int32),
            [np.int64(1), 2, 3],
            [torch.tensor([1, 2, 3])],
            iter([[1, 2, 3]]),
        ):
            (completion,) = generate(model, one, GREEDY)
            assert completion.ids == expected.ids
            assert completion.prompt_ids == [1, 2, 3]

    def test_numpy_scalars_are_parameters(self) -> None:
        params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(7))
        assert params.top_k == 3

    def test_single_values_stand_for_one(self) -> None:
        assert SamplingParams(stop="x").stop == ("x",)
        assert SamplingParams(stop=None).stop == ()
        assert SamplingParams(stop_token_ids=5).stop_token_ids == (5,)


class TestEmptyPrompt:
    def test_it_starts_from_bos(self, model: GPT2) -> None:
        with_config(model, bos_token_id=7)
        empty, explicit, other = generate(model, [[], [7], [5, 6]], GREEDY)
        assert empty.ids == explicit.ids
        assert empty.prompt_ids == [7]
        assert other.prompt_ids == [5, 6]

    @pytest.mark.parametrize("bos", [None, 61])
    def test_without_a_usable_bos_it_is_refused(self, model: GPT2, bos: int | None) -> None:
        with_config(model, bos_token_id=bos)
        with pytest.raises(UserError, match="prompt 0"):
            generate(model, [[]], GREEDY)


class TestText:
    def test_a_prompt_may_begin_with_or_hold_end_of_text(self, model: GPT2) -> None:
        with_config(model, eos_token_id=60)
        params = SamplingParams(temperature=0, max_new_tokens=1)
        for prompt in ([60, 3], [3, 60], [60]):
            expected = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
            assert generate(model, [prompt], params)[0].ids == [expected]

    def test_padded_rows_of_the_vocabulary_are_never_chosen(
        self, small_model: Callable[..., GPT2], demo: tuple[GPT2, Tokenizer]
    ) -> None:
        _, tokenizer = demo
        model = small_model(vocab_size=tokenizer.n_vocab + 47)
        with torch.no_grad():
            model.wte.weight[tokenizer.n_vocab + 20] *= 1000
        ids = tokenizer.encode("ROMEO:")
        logits = model(torch.tensor([ids])).logits[0, -1]
        sampled = SamplingParams(n=20, max_new_tokens=5, seed=1)
        for completion in generate(model, "ROMEO:", sampled, tokenizer=tokenizer):
            assert max(completion.ids) < tokenizer.n_vocab
        (greedy,) = generate(model, "ROMEO:", GREEDY, tokenizer=tokenizer)
        assert greedy.ids[0] == int(logits[: tokenizer.n_vocab].argmax())

    def test_stop_strings_end_the_text_and_not_the_ids(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        plain = SamplingParams(seed=3, max_new_tokens=60)
        (free,) = generate(model, "ROMEO:", plain, tokenizer=tokenizer)
        stop = free.text[10:14]
        (cut,) = generate(
            model, "ROMEO:", dataclasses.replace(plain, stop=(stop,)), tokenizer=tokenizer
        )
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.ids == free.ids[: len(cut.ids)]
        assert stop in tokenizer.decode(cut.ids)
        assert stop not in tokenizer.decode(cut.ids[:-1])

    def test_what_might_have_become_a_stop_string_is_not_lost(
        self, demo: tuple[GPT2, Tokenizer]
    ) -> None:
        model, tokenizer = demo
        plain = SamplingParams(seed=3, max_new_tokens=20)
        (free,) = generate(model, "ROMEO:", plain, tokenizer=tokenizer)
        waiting = dataclasses.replace(plain, stop=(free.text[-3:] + "§",))
        assert generate(model, "ROMEO:", waiting, tokenizer=tokenizer)[0].text == free.text

    def test_streamed_pieces_are_the_result(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        params = SamplingParams(seed=3, max_new_tokens=40, n=2, stop=("\n\n",))
        prompts = ["JULIET:\n", "What"]
        results = generate(model, prompts, params, tokenizer=tokenizer)
        events = list(stream(model, prompts, params, tokenizer=tokenizer))
        for result in results:
            own = [
                event
                for event in events
                if (event.prompt_index, event.sample_index)
                == (result.prompt_index, result.sample_index)
            ]
            assert "".join(event.text for event in own) == result.text
            assert [event.id for event in own] == result.ids
            assert [event.logprob for event in own] == result.logprobs
            assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [
                result.finish_reason
            ]

    def test_logprobs_are_the_models(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        params = SamplingParams(seed=1, temperature=0.5, top_k=3, max_new_tokens=20)
        (completion,) = generate(model, "To be", params, tokenizer=tokenizer)
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0].double().log_softmax(-1)
        start = completion.n_prompt_tokens
        expected = [float(logprobs[t - 1, ids[0, t]]) for t in range(start, ids.shape[1])]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_defaults_of_the_config_are_gpt2s() -> None:
    config = GPT2Config()
    assert (config.bos_token_id, config.eos_token_ids) == (50256, (50256,))
