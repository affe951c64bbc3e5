"""Parity with transformers on small models that cross the config's fields and on the demo, and
proof that the comparison sees a wrong model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptile.bench import parity
from gptile.bench.huggingface import import_transformers
from gptile.bench.parity import Line, compare, random_prompts
from gptile.bench.passes import Inputs, pieces
from gptile.kernels import IGNORE_INDEX, Ops
from gptile.model.errors import UserError
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


def errors(directory: Path, ops: Ops | None = None, **kwargs: object) -> list[Line]:
    return compare(directory, kernels={"given": ops}, **kwargs).lines


def red(lines: Sequence[Line]) -> list[str]:
    return [str(line) for line in lines if not line.ok]


def quantities(lines: Sequence[Line], section: str) -> list[str]:
    return [line.subject.quantity for line in lines if line.subject.section == section]


@pytest.mark.parametrize("name", CONFIGS)
def test_parity_of_small_configs(tmp_path: Path, name: str) -> None:
    lines = errors(write_reference(tmp_path / "model", **CONFIGS[name]))
    assert red(lines) == []
    n_layer = CONFIGS[name].get("n_layer", 2)
    forward = quantities(lines, "forward")
    assert forward[-n_layer - 1 :] == [f"hidden state {i}" for i in range(n_layer + 1)]
    assert forward.count("output") == 9 * n_layer + 2
    assert {"logits", "loss"} < set(forward)
    untied = CONFIGS[name].get("tie_word_embeddings") is False
    gradients = quantities(lines, "backward")
    assert sum(name.startswith("grad ") for name in gradients) == 4 + 12 * n_layer + untied
    assert quantities(lines, "cached").count("output") == 6 * n_layer + 2
    assert "decode step 10 logits" in quantities(lines, "cached")
    assert quantities(lines, "consistency") == [
        "cached against uncached",
        "ragged batch against alone",
    ]
    assert lines[-1].subject.section == "greedy"


def test_parity_of_the_demo() -> None:
    assert red(errors(DEMO, n_tokens=96, n_greedy=48)) == []


@pytest.mark.parametrize("name", ["head_dim 64", "Mistral's flags"])
def test_parity_in_16_bits(tmp_path: Path, name: str) -> None:
    directory = write_reference(tmp_path / "model", **CONFIGS[name])
    lines = errors(directory, dtypes=[torch.float16, torch.bfloat16])
    assert red(lines) == []
    assert {line.dtype for line in lines} == {"float16", "bfloat16"}
    assert not quantities(lines, "greedy"), "two right ones may differ there"


KERNEL_CONFIGS = [
    *("head_dim 40", "narrow mlp", "untied head", "gelu", "Mistral's flags"),
    *("unscaled attention", "large epsilon"),
]


@pytest.mark.parametrize("name", KERNEL_CONFIGS)
def test_parity_of_the_kernels(tmp_path: Path, name: str) -> None:
    """All of ``Ops.triton()`` in Triton's interpreter: values, gradients, cache and greedy ids."""
    directory = write_reference(tmp_path / "model", vocab_size=67, **CONFIGS[name])
    assert red(errors(directory, Ops.triton(), n_tokens=19, n_greedy=2)) == []


def test_parity_of_the_kernels_on_the_demo() -> None:
    prompts = random_prompts(2048, n_rows=1, n_tokens=8, seed=0)
    assert red(errors(DEMO, Ops.triton(), prompts=prompts, n_greedy=1)) == []


def test_parity_of_the_kernels_in_16_bits(tmp_path: Path) -> None:
    directory = write_reference(tmp_path / "model", **CONFIGS["head_dim 64"], vocab_size=67)
    assert red(errors(directory, Ops.triton(), dtypes=[torch.float16], n_tokens=19)) == []


def test_ragged_prompts_are_compared_where_they_have_tokens(plain: Path) -> None:
    prompts = [[7, 3, 9, 11, 2, 5, 8], [1], [4, 4, 4, 6]]
    found = compare(plain, prompts=prompts, n_greedy=5)
    assert red(found.lines) == []
    assert found.n_tokens == [7, 1, 4]
    # What the padding holds makes no difference: the first row alone has its own errors there.
    (loss,) = (line for line in found.lines if line.subject.quantity == "loss")
    assert loss.error.max_abs < 1e-5
    assert [len(ids) for ids in found.greedy["auto"]] == [5, 5, 5]


def test_targets_are_the_next_ids_and_nothing_after_a_row_s_last() -> None:
    inputs = Inputs([[5, 6, 7], [8]], 0)
    assert inputs.ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs.targets.tolist() == [[6, 7, IGNORE_INDEX], [IGNORE_INDEX] * 3]
    assert Inputs([[1] * 8] * 4, 0).ragged.tolist() == [8, 7, 6, 5]


@given(st.integers(1, 2000))
def test_a_cache_is_fed_every_token_once(n_tokens: int) -> None:
    spans = pieces(n_tokens)
    assert [token for span in spans for token in range(*span)] == [*range(n_tokens)]
    n_steps = sum(end - start == 1 for start, end in spans[1:])
    assert n_steps >= min(n_tokens // 3, 24)


def test_what_is_not_compared_is_said(plain: Path) -> None:
    assert compare(plain, n_tokens=8).notes == []
    alone = " ".join(compare(plain, prompts=[[1, 2]]).notes)
    assert "no ragged batch" in alone
    assert "only 2 tokens" in alone
    assert "room" in " ".join(compare(plain, n_tokens=64).notes)
    assert "16 bits" in " ".join(compare(plain, n_tokens=4, dtypes=[torch.bfloat16]).notes)


def test_prompts_that_cannot_be_compared_are_refused(plain: Path) -> None:
    with pytest.raises(UserError, match="65 tokens exceed the context of 64"):
        compare(plain, n_tokens=65)
    with pytest.raises(UserError, match="two tokens"):
        compare(plain, prompts=[[3], [4]])


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
            errors(directory)
    else:
        assert red(errors(directory))[0].startswith(f"layer 0, {forgotten}")


# What bf16 itself rounds away hides a smaller fault there.
@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.0001), (torch.float16, 1.05), (torch.bfloat16, 1.25)]
)
def test_parity_sees_a_cache_that_is_slightly_off(dtype: torch.dtype, factor: float) -> None:
    def scaled(*args):
        *rest, scale = args
        return Ops.torch().decode_attention(*rest, scale * factor)

    ops = Ops.torch().replace(decode_attention=scaled)
    found = [line for line in errors(DEMO, ops, dtypes=[dtype]) if not line.ok]
    assert str(found[0]).startswith("layer 0, attention (cached, kernel decode_attention)")
    assert "cached logits" in quantities(found, "cached")


def judged(error: float, eager: float, sdpa: float, section: str = "forward") -> Line:
    references = {"eager": eager, "sdpa": sdpa}
    subject = parity.Subject(section, "x")
    allowed = parity._allowed(subject, references.values(), torch.float32)
    return Line(subject, "float32", "given", parity.Error(error, error), references, allowed)


def test_the_bound_is_the_policy_s() -> None:
    """1.5e-6 and 2^-24, or sqrt(2) times that."""
    assert judged(1.559e-6, 1e-6, 0.4e-6).ok
    assert judged(1.559e-6, 0.4e-6, 1e-6).ok
    assert not judged(1.560e-6, 1e-6, 1e-6).ok
    assert judged(2.205e-6, 1e-6, 1e-6, "consistency").ok
    assert not judged(2.206e-6, 1e-6, 1e-6, "consistency").ok
    assert judged(0.0, 0.0, 0.0, "greedy").ok
    assert not judged(1 / 48, 0.0, 0.0, "greedy").ok


def test_nan_is_not_parity() -> None:
    assert not judged(torch.nan, 1.0, 1.0).ok
    assert not judged(1.0, torch.nan, torch.nan).ok
    assert judged(1.0, torch.nan, 1.0).ok, "one reference is enough"
    assert judged(1.0, 1.0, torch.nan).ok
    assert (
        max([judged(1.0, 1.0, 1.0), judged(torch.nan, 1.0, 1.0)], key=lambda x: x.excess).excess > 1
    )


def test_an_error_is_what_it_says() -> None:
    truth = torch.tensor([[3.0, 4.0], [1.0, 1.0]]).double()
    found = parity._error(truth + 0.5, truth, torch.tensor([True, False]))
    assert found.relative == pytest.approx(0.5**0.5 / 5)
    assert found.max_abs == pytest.approx(0.5)
    everywhere = torch.ones(2, dtype=torch.bool)
    worst = parity._worst_position(truth + torch.tensor([0.0, 0.1]), truth, everywhere)
    assert worst.relative == pytest.approx(0.1 / 2**0.5)


def test_the_error_of_a_loss_is_no_luck() -> None:
    """Errors of single tokens that cancel in the mean still count as the reference's."""
    truth = torch.tensor([2.0, 4.0]).double()
    reference = parity._loss_error(truth + torch.tensor([0.3, -0.3]), truth)
    assert reference.relative == pytest.approx(0.1)
    ours = parity._loss_error(torch.tensor(3.15), truth)
    assert ours.relative == pytest.approx(0.05)
