"""The compiled decoder against the model: the same logits, the same text."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gptile.bench.checkpoints import checkpoint_directory
from gptile.kernels.cpu_decode import PRECISIONS, pack, unpack
from gptile.model.cpu_decoder import CPUDecoder, set_threads
from gptile.model.errors import UserError
from gptile.model.generation import generate
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import ContextLengthError, KVCache
from gptile.model.sampling import SamplingParams
from gptile.model.tokenizer import Tokenizer
from gptile.weights import open_checkpoint

CONFIGS: dict[str, dict[str, object]] = {
    "plain": {},
    "odd widths": {"n_embd": 33, "n_head": 3, "n_inner": 50, "vocab_size": 59},
    "one head": {"n_head": 1},
    "untied": {"tie_word_embeddings": False},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False},
    "large epsilon": {"layer_norm_epsilon": 0.1},
}
LENGTHS, STEPS = [9, 4, 1, 7, 2], 6


def as_stored(model: GPT2, precision: str) -> GPT2:
    """The model whose matrices are what the decoder stores."""
    model = copy.deepcopy(model)
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for weight in [*matrices, model.wte.weight]:
            weight.copy_(unpack(pack(weight, None, precision)))
    return model


@torch.inference_mode()
def steps(model: GPT2, step: Callable | None = None) -> Tensor:
    """``[steps, B, V]`` logits of forced tokens after ragged prompts, in slots in reverse order, in
    a cache that is NaN where nothing was written."""
    generator = torch.Generator().manual_seed(3)
    vocab_size = model.config.vocab_size
    dtype, n_rows = model.wte.weight.dtype, len(LENGTHS)
    prompts = torch.randint(vocab_size, (n_rows, max(LENGTHS)), generator=generator)
    forced = torch.randint(vocab_size, (STEPS, n_rows), generator=generator)
    cache = KVCache(model.config, n_rows + 1, max(LENGTHS) + STEPS, dtype=dtype)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    slots = torch.arange(n_rows, 0, -1)
    model(prompts, lengths=torch.tensor(LENGTHS), cache=cache, slots=slots, logits_for="none")
    found = []
    for ids in forced:
        if step is None:
            output = model(ids[:, None], cache=cache, slots=slots, logits_for="last")
            assert output.logits is not None
            found.append(output.logits[:, 0])
        else:
            found.append(step(ids, cache, slots))
    assert cache.lengths.tolist() == [0, *reversed([n + STEPS for n in LENGTHS])]
    return torch.stack(found)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check(model: GPT2, found: Tensor) -> None:
    """Parity's policy, with the plain fp32 model in the place of transformers."""
    expected = steps(copy.deepcopy(model).double())
    bound = 1.5 * relative(steps(model), expected) + torch.finfo(torch.float32).eps / 2
    assert relative(found, expected) <= bound


class TestLogits:
    @pytest.mark.parametrize("config", CONFIGS)
    def test_float32(self, small_model: Callable[..., GPT2], config: str) -> None:
        model = small_model(**CONFIGS[config])
        check(model, steps(model, CPUDecoder(model)))

    @pytest.mark.parametrize("precision", PRECISIONS[1:])
    @pytest.mark.parametrize("config", ["plain", "odd widths", "untied"])
    def test_stored_weights(
        self, small_model: Callable[..., GPT2], config: str, precision: str
    ) -> None:
        """Equal to PyTorch's computation on the same stored weights. Between them the prompt's K
        and V are the same too: both take them from a plain model on those weights."""
        model = small_model(**CONFIGS[config])
        stored = as_stored(model, precision)
        decoder = CPUDecoder(model, precision)
        check(stored, steps(stored, decoder))

    @pytest.mark.parametrize("fault", ["epsilon", "scale", "bias", "layers", "position", "head"])
    def test_faults_are_seen(self, model: GPT2, fault: str) -> None:
        wrong = copy.deepcopy(model)
        with torch.no_grad():
            if fault == "epsilon":
                for block in wrong.h:
                    block.ln_2.eps *= 2
            elif fault == "scale":
                wrong.h[2].attn.scale *= 1.001
            elif fault == "bias":
                wrong.h[0].mlp.c_proj.bias.zero_()
            elif fault == "layers":
                wrong.h[0], wrong.h[1] = wrong.h[1], wrong.h[0]
            elif fault == "position":
                wrong.wpe.weight.copy_(wrong.wpe.weight.roll(1, 0))
            else:
                wrong.wte.weight[5] *= 1.001
        with pytest.raises(AssertionError):
            check(model, steps(model, CPUDecoder(wrong)))

    def test_a_row_is_as_if_alone(self, model: GPT2) -> None:
        decoder = CPUDecoder(model)
        ids = torch.tensor([3, 7, 1, 9, 2, 8])
        with torch.inference_mode():
            cache = KVCache(model.config, 6, 4)
            together = decoder(ids, cache, torch.arange(6))
            for row in range(6):
                cache = KVCache(model.config, 6, 4)
                alone = decoder(ids[row : row + 1], cache, torch.tensor([row]))
                assert relative(alone[0], together[row].double()) < 1e-6

    def test_any_number_of_threads(self, model: GPT2) -> None:
        before = torch.get_num_threads()
        decoder = CPUDecoder(model)
        found = []
        try:
            for threads in (1, 2):
                set_threads(threads)
                cache = KVCache(model.config, 6, 4)
                with torch.inference_mode():
                    found.append(decoder(torch.arange(6), cache, torch.arange(6)))
        finally:
            set_threads(before)
        assert torch.equal(*found)

    def test_packing_leaves_the_model_as_it_was(self, model: GPT2) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        size = sum(p.untyped_storage().nbytes() for p in model.parameters())
        CPUDecoder(model)
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        assert sum(storage.nbytes() for storage in storages.values()) == size


class TestErrors:
    def test_a_full_cache(self, model: GPT2) -> None:
        decoder, cache = CPUDecoder(model), KVCache(model.config, 1, 2)
        slot = torch.tensor([0])
        with torch.inference_mode():
            for _ in range(2):
                decoder(torch.tensor([1]), cache, slot)
            with pytest.raises(ContextLengthError):
                decoder(torch.tensor([1]), cache, slot)

    @pytest.mark.parametrize("ids", [[-1], [61], []])
    def test_ids_that_are_none(self, model: GPT2, ids: list[int]) -> None:
        cache = KVCache(model.config, 1, 2)
        slots = torch.arange(len(ids))
        with pytest.raises(ValueError, match="from 0 to 60"):
            CPUDecoder(model)(torch.tensor(ids, dtype=torch.int64), cache, slots)
        assert cache.lengths.tolist() == [0]

    def test_another_cache(self, model: GPT2, small_model: Callable[..., GPT2]) -> None:
        decoder, one = CPUDecoder(model), torch.tensor([0])
        for cache in (
            KVCache(small_model(n_layer=2).config, 1, 2),
            KVCache(model.config, 1, 2, dtype=torch.bfloat16),
        ):
            with pytest.raises(ValueError, match="float32 cache of"):
                decoder(one, cache, one)

    def test_another_model(self, model: GPT2) -> None:
        with pytest.raises(UserError, match=r"float32 model on a CPU, not torch\.bfloat16"):
            CPUDecoder(copy.deepcopy(model).bfloat16())
        with pytest.raises(UserError, match="int4"):
            CPUDecoder(model, "int4")

    def test_weights_that_are_nan_are_said(self, model: GPT2) -> None:
        with torch.no_grad():
            model.h[1].mlp.c_fc.weight[0, 0] = torch.nan
        decoder = CPUDecoder(model)
        with pytest.raises(UserError, match="NaN"):
            generate(model, [[1, 2]], SamplingParams(max_new_tokens=4), decode_step=decoder)


PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], [11, 12], [5, 3, 5, 8, 9], [2] * 30]


def greedy(model: GPT2, prompts: list[list[int]], step: Callable | None) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=200, temperature=0, stop_token_ids=())
    return [found.ids for found in generate(model, prompts, params, decode_step=step)]


class TestText:
    @pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["batch 1", "batch 5, ragged"])
    def test_greedy_ids_of_the_demo(
        self, demo: tuple[GPT2, Tokenizer], prompts: list[list[int]]
    ) -> None:
        model, _ = demo
        assert greedy(model, prompts, CPUDecoder(model)) == greedy(model, prompts, None)

    def test_greedy_ids_of_gpt2s_size(self) -> None:
        with checkpoint_directory("random:gpt2") as directory:
            model = open_checkpoint(directory).load_model()
        decoder = CPUDecoder(model)
        for prompts in (PROMPTS[:1], PROMPTS):
            assert greedy(model, prompts, decoder) == greedy(model, prompts, None)

    def test_sampled_text_with_stop_strings(self, demo: tuple[GPT2, Tokenizer]) -> None:
        model, tokenizer = demo
        params = SamplingParams(max_new_tokens=60, temperature=0.9, top_p=0.9, n=3, seed=1)
        plain, fast = (
            [
                found.text
                for found in generate(
                    model, ["ROMEO:\n"], params, tokenizer=tokenizer, decode_step=step
                )
            ]
            for step in (None, CPUDecoder(model))
        )
        assert fast == plain

    def test_int8_scores_the_text_nearly_as_well(
        self, demo: tuple[GPT2, Tokenizer], shakespeare: Path
    ) -> None:
        """Perplexity on the text's last tokens, through the decoder, is within 0.5 %."""
        model, tokenizer = demo
        ids = torch.tensor(tokenizer.encode(shakespeare.read_text()[-12_000:]))
        rows = ids[: 16 * 200].view(16, 200)
        losses = {}
        for precision in ("float32", "int8"):
            decoder = CPUDecoder(model, precision)
            cache, slots = KVCache(model.config, 16, 200), torch.arange(16)
            with torch.inference_mode():
                logits = torch.stack([decoder(column, cache, slots) for column in rows.T], 1)
            losses[precision] = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
            ).exp()
        assert abs(losses["int8"] / losses["float32"] - 1) < 0.005
