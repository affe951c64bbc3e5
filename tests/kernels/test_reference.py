"""The PyTorch references against formulas written out in fp64, and against known values."""

import math

import pytest
import torch

from gptile.kernels import ACTIVATIONS, IGNORE_INDEX, Ops
from gptile.kernels.activations import REFERENCES
from gptile.kernels.attention import attention_reference
from gptile.kernels.layer_norm import add_layer_norm_reference, layer_norm_reference
from gptile.kernels.linear_cross_entropy import linear_cross_entropy_reference


def exact_attention(q, k, v, scale):
    """Causal attention in fp64, by the formula. [B, T, H, D] in, [B, T, H * D] out."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = scale * q @ k.transpose(-1, -2)
    n = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80])
@pytest.mark.parametrize("n", [1, 2, 17, 65])
def test_attention_reads_strided_views_of_the_packed_projection(n: int, head_dim: int) -> None:
    n_head = 3
    qkv = torch.randn(2, n, 3 * n_head * head_dim) * 3 + 0.5
    q, k, v = qkv.unflatten(2, (3, n_head, head_dim)).unbind(2)
    scale = head_dim**-0.5
    expected = exact_attention(q, k, v, scale)
    out = attention_reference(q, k, v, scale)
    assert (out - expected).norm() / expected.norm() < 1e-6


def test_attention_scale_is_honoured() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
    for scale in (1.0, 0.1):
        expected = exact_attention(q, k, v, scale)
        assert (attention_reference(q, k, v, scale) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("gelu", 1.0, 0.8413447),
        ("gelu", -3.0, -0.0040497),
        ("gelu_new", 1.0, 0.8411920),
        ("gelu_new", -3.0, -0.0036374),
        ("gelu_fast", 1.0, 0.8411920),
        ("gelu_pytorch_tanh", -3.0, -0.0036374),
        ("relu", -3.0, 0.0),
        ("relu", 2.0, 2.0),
        ("silu", 1.0, 0.7310586),
        ("swish", 1.0, 0.7310586),
    ],
)
def test_activation_values(name: str, at: float, value: float) -> None:
    assert float(REFERENCES[ACTIVATIONS[name]](torch.tensor(at))) == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize("n", [1, 3, 17, 768])
def test_add_layer_norm_returns_sum_and_norm(n: int) -> None:
    x, delta = torch.randn(2, 4, n) + 3
    weight, bias = torch.randn(2, n)
    total, normed = add_layer_norm_reference(x, delta, weight, bias, 1e-5)
    exact = (x + delta).double()
    centred = exact - exact.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed.double(), expected.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_and_softmax_of_16_bit_inputs_are_not_16_bit(dtype: torch.dtype) -> None:
    """The result is off by its own rounding and no more."""
    step = torch.finfo(dtype).eps
    x = (torch.randn(8, 768) + 20).to(dtype)
    weight, bias = torch.randn(2, 768).to(dtype)
    exact = torch.nn.functional.layer_norm(x.double(), (768,), weight.double(), bias.double(), 1e-5)
    got = layer_norm_reference(x, weight, bias, 1e-5)
    assert (got - exact).norm() / exact.norm() < step / 2
    q, k, v = (torch.randn(3, 1, 200, 2, 64) * 3).to(dtype).unbind(0)
    exact = exact_attention(q, k, v, 0.125)
    got = attention_reference(q, k, v, 0.125)
    assert (got - exact).norm() / exact.norm() < step


class TestLinearCrossEntropy:
    def test_equals_the_formula(self) -> None:
        x, weight = torch.randn(2, 3, 8), torch.randn(11, 8)
        targets = torch.tensor([[0, 10, IGNORE_INDEX], [5, IGNORE_INDEX, 5]])
        logits = x.double() @ weight.double().T
        losses = torch.zeros(2, 3, dtype=torch.double)
        for row, column in (targets != IGNORE_INDEX).nonzero().tolist():
            at = logits[row, column]
            losses[row, column] = at.exp().sum().log() - at[targets[row, column]]
        for reduction, expected in (
            ("none", losses),
            ("sum", losses.sum()),
            ("mean", losses.sum() / 4),
        ):
            got = linear_cross_entropy_reference(x, weight, targets, reduction)
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)

    def test_nothing_to_predict_is_zero_not_nan(self) -> None:
        x = torch.randn(1, 2, 4, requires_grad=True)
        loss = linear_cross_entropy_reference(
            x, torch.randn(5, 4), torch.full((1, 2), IGNORE_INDEX)
        )
        loss.backward()
        assert loss.item() == 0
        assert not x.grad.any()

    def test_16_bit_inputs_are_judged_in_fp32(self) -> None:
        x, weight = torch.randn(4, 8).bfloat16(), torch.randn(11, 8).bfloat16()
        assert linear_cross_entropy_reference(x, weight, torch.arange(4)).dtype == torch.float32


def test_ops_replace_swaps_one_operation() -> None:
    ops = Ops.torch()
    swapped = ops.replace(layer_norm=lambda x, *_: x)
    assert swapped.layer_norm is not ops.layer_norm
    assert swapped.attention is ops.attention
    with pytest.raises(TypeError):
        ops.replace(no_such_operation=None)
