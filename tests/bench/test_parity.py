"""Parity with transformers on small models that cross the config's fields and on the demo, and
proof that the comparison sees a wrong model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptile.bench import parity
from gptile.bench.huggingface import import_transformers
from gptile.bench.parity import compare
from gptile.kernels import Ops
from gptile.kernels.embedding import embedding_reference
from gptile.kernels.layer_norm import layer_norm_reference
from gptile.weights import checkpoint
from gptile.weights.files import DEMO
from gptile.weights.names import is_conv1d

CONFIGS: dict[str, dict] = {
    "plain": {"n_embd": 48, "n_head": 3},
    "17 heads of 8": {"n_embd": 136, "n_head": 17},
    "25 heads": {"n_embd": 200, "n_head": 25},
    "head_dim 40": {"n_embd": 80, "n_head": 2},
    "head_dim 64": {"n_embd": 128, "n_head": 2},
    "head_dim 80, one layer": {"n_embd": 160, "n_head": 2, "n_layer": 1},
    "head_dim 128": {"n_embd": 256, "n_head": 2},
    "narrow mlp": {"n_embd": 48, "n_head": 3, "n_inner": 50},
    "untied head": {"n_embd": 48, "n_head": 3, "tie_word_embeddings": False},
    "gelu": {"n_embd": 48, "n_head": 3, "activation_function": "gelu"},
    "gelu_fast": {"n_embd": 48, "n_head": 3, "activation_function": "gelu_fast"},
    "gelu_pytorch_tanh": {"n_embd": 48, "n_head": 3, "activation_function": "gelu_pytorch_tanh"},
    "relu": {"n_embd": 48, "n_head": 3, "activation_function": "relu"},
    "silu": {"n_embd": 48, "n_head": 3, "activation_function": "silu"},
    "Mistral's flags": {
        "n_embd": 48,
        "n_head": 3,
        "n_layer": 3,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
    },
    "unscaled attention": {"n_embd": 48, "n_head": 3, "scale_attn_weights": False},
    "large epsilon": {"n_embd": 48, "n_head": 3, "layer_norm_epsilon": 0.1},
}


def write_reference(directory: Path, **fields: object) -> Path:
    """A random model saved by transformers, every parameter random: biases and LayerNorms too, or a
    mistake in them would not show."""
    transformers = import_transformers()
    defaults = {"n_layer": 2, "vocab_size": 211, "n_positions": 64, "initializer_range": 0.15}
    defaults |= {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**defaults, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_reference(tmp_path / "model", **CONFIGS["plain"])


def failures(directory: Path, **kwargs: object) -> list[str]:
    return [result.name for result in compare(directory, **kwargs) if not result.ok]


@pytest.mark.parametrize("name", CONFIGS)
def test_parity_of_small_configs(tmp_path: Path, name: str) -> None:
    directory = write_reference(tmp_path / "model", **CONFIGS[name])
    results = compare(directory)
    assert [result for result in results if not result.ok] == []
    names = [result.name for result in results]
    n_layer = CONFIGS[name].get("n_layer", 2)
    assert names[: n_layer + 3] == [
        *(f"hidden state {i}" for i in range(n_layer + 1)),
        "logits",
        "loss",
    ]
    assert sum(name.startswith("grad ") for name in names) == 4 + 12 * n_layer + (
        CONFIGS[name].get("tie_word_embeddings") is False
    )
    assert names[-2:] == ["cached logits", "greedy ids"]


def test_parity_of_the_demo() -> None:
    assert failures(DEMO, n_tokens=96, n_greedy=48) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["head_dim 64", "Mistral's flags"])
def test_parity_in_16_bits(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    directory = write_reference(tmp_path / "model", **CONFIGS[name])
    assert failures(directory, dtype=dtype) == []


KERNEL_CONFIGS = [
    *("head_dim 40", "narrow mlp", "untied head", "gelu", "Mistral's flags"),
    *("unscaled attention", "large epsilon"),
]


@pytest.mark.parametrize("name", KERNEL_CONFIGS)
def test_parity_of_the_kernels(tmp_path: Path, name: str) -> None:
    """All of ``Ops.triton()`` in Triton's interpreter: values, gradients, cache and greedy ids."""
    directory = write_reference(tmp_path / "model", vocab_size=67, **CONFIGS[name])
    assert failures(directory, ops=Ops.triton(), n_tokens=19, n_greedy=5) == []


def test_parity_of_the_kernels_on_the_demo() -> None:
    assert failures(DEMO, ops=Ops.triton(), n_rows=1, n_tokens=8, n_greedy=1) == []


def test_parity_of_the_kernels_in_16_bits(tmp_path: Path) -> None:
    directory = write_reference(tmp_path / "model", **CONFIGS["head_dim 64"], vocab_size=67)
    ops = Ops.triton()
    assert failures(directory, dtype=torch.float16, ops=ops, n_tokens=19, n_greedy=5) == []


def off_by_one(ids, positions, wte, wpe, dropout_p=0.0):
    return embedding_reference(ids, (positions + 1).clamp(max=len(wpe) - 1), wte, wpe, dropout_p)


def other_epsilon(x, weight, bias, eps):
    return layer_norm_reference(x, weight, bias, eps * 2)


def unscaled(q, k, v, scale, dropout_p=0.0):
    return Ops.torch().attention(q, k, v, 1.0, dropout_p)


def leaky(q, k, v, scale, dropout_p=0.0):
    """Each query sees one key of its future."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def erf_gelu(x, weight, bias, activation):
    return Ops.torch().linear_activation(x, weight, bias, "gelu")


def head_zero_for_all(q, k, v, scale, dropout_p=0.0):
    return Ops.torch().attention(
        q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), scale, dropout_p
    )


PLANTED: dict[str, tuple[str, Callable]] = {
    "a position off by one": ("embedding", off_by_one),
    "another epsilon": ("layer_norm", other_epsilon),
    "no 1/sqrt(d)": ("attention", unscaled),
    "a glimpse of the future": ("attention", leaky),
    "erf for tanh": ("linear_activation", erf_gelu),
    "head 0 for every head": ("attention", head_zero_for_all),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_parity_sees_a_planted_fault(plain: Path, fault: str) -> None:
    operation, wrong = PLANTED[fault]
    found = failures(plain, ops=Ops.torch().replace(**{operation: wrong}))
    assert "logits" in found
    assert "loss" in found


@pytest.mark.parametrize("forgotten", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
def test_parity_sees_a_forgotten_transpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    # With n_inner = n_embd the MLP's weights are square too, so no shape gives the mistake away.
    square = {"n_embd": 48, "n_head": 3, "n_inner": 48}
    directory = write_reference(tmp_path / "model", **square)
    monkeypatch.setattr(
        checkpoint, "is_conv1d", lambda name: is_conv1d(name) and forgotten not in name
    )
    if forgotten == "attn.c_attn":
        with pytest.raises(checkpoint.CheckpointError, match="c_attn"):
            failures(directory)
    else:
        assert "logits" in failures(directory)


def test_parity_sees_a_wrong_cache(plain: Path) -> None:
    def stale(q, k_cache, v_cache, slots, starts, counts, scale):
        return Ops.torch().decode_attention(
            q, k_cache, v_cache, slots, starts - (starts > 0).to(starts), counts, scale
        )

    found = failures(plain, ops=Ops.torch().replace(decode_attention=stale))
    assert found == ["cached logits", "greedy ids"]


# What bf16 itself rounds away hides a smaller fault there.
@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.0001), (torch.float16, 1.05), (torch.bfloat16, 1.25)]
)
def test_parity_sees_a_cache_that_is_slightly_off(dtype: torch.dtype, factor: float) -> None:
    def scaled(*args):
        *rest, scale = args
        return Ops.torch().decode_attention(*rest, scale * factor)

    ops = Ops.torch().replace(decode_attention=scaled)
    assert "cached logits" in failures(DEMO, ops=ops, dtype=dtype)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def test_parity_sees_a_wrong_gradient(plain: Path) -> None:
    def wrong(x, weight, bias, activation):
        return _HalfGradient.apply(Ops.torch().linear_activation(x, weight, bias, activation))

    found = failures(plain, ops=Ops.torch().replace(linear_activation=wrong))
    assert "grad h.1.mlp.c_fc.weight" in found
    assert all(name.startswith("grad ") for name in found)


def test_nan_is_not_parity() -> None:
    judged = parity._judge("x", torch.tensor(torch.nan), torch.ones(1), torch.ones(1), 1e-7)
    assert not judged.ok


def test_a_comparison_is_what_it_says() -> None:
    truth = torch.tensor([3.0, 4.0]).double()
    result = parity._judge("x", truth + 0.5, truth + torch.tensor([0.0, 0.4]), truth, 1e-7)
    assert result.error == pytest.approx(0.5**0.5 / 5 * 1.0)
    assert result.reference_error == pytest.approx(0.08)
    assert result.max_abs == pytest.approx(0.5)
    assert not result.ok
    assert parity._judge("x", truth + 0.1, truth + 0.1, truth, 1e-7).ok
