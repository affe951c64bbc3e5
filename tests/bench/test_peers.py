"""Other people's engines: what is ours in front of them, and each of them where it is installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptile.bench import peers
from gptile.bench.conversions import _CachedStep, _gguf_tensors, to_gguf
from gptile.bench.engines import ENGINES, Choice, Setup, load_class, missing
from gptile.bench.huggingface import load_reference
from gptile.bench.model_checks import BOUNDS
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.weights import save_checkpoint
from gptile.weights.files import DEMO

IDS = np.random.default_rng(0).integers(2048, size=(3, 12)).tolist()
PEERS = [
    Choice(name, precision)
    for name, entry in ENGINES.items()
    if entry.peer
    for precision in entry.precisions
]


@pytest.fixture(scope="module")
def logits() -> Any:
    """In fp64."""
    with torch.no_grad():
        return load_reference(DEMO, torch.float64)(torch.tensor(IDS)).logits.numpy()


@pytest.fixture
def peer(tmp_path: Path) -> Callable[[Choice], Any]:
    """Converts the demo and loads it."""

    def load(choice: Choice) -> Any:
        if missing(choice):
            pytest.skip(f"{', '.join(missing(choice))} not installed: pip install '.[peers]'")
        made_by = load_class(choice.entry.made_by)
        setup = Setup(DEMO, tmp_path / "converted", choice.precision, "cpu", 1)
        made_by.convert(setup)  # type: ignore[attr-defined]
        return made_by(setup)

    return load


@pytest.mark.parametrize("choice", PEERS, ids=str)
def test_a_peer_computes_the_model(peer: Callable, logits: Any, choice: Choice) -> None:
    engine = peer(choice)
    found = engine.logits(IDS)
    error = np.linalg.norm(found - logits) / np.linalg.norm(logits)
    # A tenth of the bound: the demo is small.
    assert error < BOUNDS[choice.precision][0] / 10
    assert engine.generate(IDS, 1) == logits[:, -1].argmax(-1)[:, None].tolist()
    if choice.precision == "float32":
        reference = load_reference(DEMO, torch.float32)
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        prompts = torch.tensor(IDS)
        mask = torch.ones_like(prompts)
        for n_rows, n_new in ((3, 9), (1, 20), (3, 1)):  # a cache that grows and shrinks
            expected = reference.generate(
                prompts[:n_rows], attention_mask=mask[:n_rows], max_new_tokens=n_new, **options
            )[:, 12:]
            assert engine.generate(IDS[:n_rows], n_new) == expected.tolist()
    if "score" in choice.entry.tasks:
        chosen = np.array(IDS)[:, 1:, None]
        scores = torch.tensor(logits[:, :-1]).log_softmax(-1).numpy()
        expected_loss = -np.take_along_axis(scores, chosen, 2).mean()
        rounding = 1e-6 if choice.precision == "float32" else 1e-2
        assert engine.score(IDS) == pytest.approx(expected_loss, rel=rounding)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_inner": 50},
    ],
    ids=str,
)
def test_the_exported_step_is_the_model(small_model: Callable[..., GPT2], fields: dict) -> None:
    """In two pieces over its cache."""
    model = small_model(**fields)
    ids = torch.randint(61, (2, 9))
    step = _CachedStep(model)
    empty = [torch.zeros(2, 3, 0, 8) for _ in range(6)]
    first, *past = step(ids[:, :5], torch.arange(5), empty)
    last, *past = step(ids[:, 5:], torch.tensor([1, 3]), past)
    expected = model(ids).logits
    torch.testing.assert_close(first, expected[:, :5])
    torch.testing.assert_close(last, expected[:, [6, 8]])
    assert [tuple(cache.shape) for cache in past] == [(2, 3, 9, 8)] * 6


def test_every_parameter_has_llama_cpps_name(small_model: Callable[..., GPT2]) -> None:
    model = small_model(n_layer=1, tie_word_embeddings=False)
    found = dict(_gguf_tensors(model))
    assert set(found) == {
        "token_embd.weight",
        "position_embd.weight",
        "output_norm.weight",
        "output_norm.bias",
        "output.weight",
        *(
            f"blk.0.{name}.{kind}"
            for name in ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
            for kind in ("weight", "bias")
        ),
    }
    assert found["blk.0.ffn_up.weight"] is model.h[0].mlp.c_fc.weight  # type: ignore[union-attr]
    assert found["output.weight"] is model.lm_head.weight


def test_what_llama_cpp_does_not_compute_is_refused(
    small_model: Callable[..., GPT2], tmp_path: Path
) -> None:
    for fields in ({"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}):
        save_checkpoint(small_model(**fields), tmp_path / "model", overwrite=True)
        with pytest.raises(UserError, match="tanh GELU"):
            to_gguf(tmp_path / "model", tmp_path / "converted", "float32")


class Counting(peers._Stepper):
    """Its likeliest id is the last one plus the number of tokens so far, modulo 50."""

    def start(self, n_rows: int, n_tokens: int) -> None:
        self.seen = np.zeros((n_rows, 0), dtype=np.int64)
        self.room = n_tokens

    def step(self, ids: Any, keep: Any) -> Any:
        start = self.seen.shape[1]
        self.seen = np.concatenate([self.seen, ids], 1)
        assert self.seen.shape[1] <= self.room
        lengths = start + 1 + np.arange(ids.shape[1])
        return np.eye(50)[(ids + lengths) % 50][:, keep]


def test_a_stepper_feeds_back_what_it_chose() -> None:
    # After 3 tokens: 5 + 3, then 8 + 4, then 12 + 5.
    assert Counting().generate([[1, 9, 5], [2, 2, 0]], 3) == [[8, 12, 17], [3, 7, 12]]


def test_a_steppers_logits_come_through_the_cache() -> None:
    found = Counting().logits([[1, 9, 5, 7, 3]])
    assert found.shape == (1, 5, 50)
    assert found.argmax(-1).tolist() == [[2, 11, 8, 11, 8]]
