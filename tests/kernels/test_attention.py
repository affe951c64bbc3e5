"""The attention kernels in Triton's interpreter against fp64: values, gradients, layouts, peaked
softmax, and proof that wrong kernels are seen."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gptile.kernels import Ops, attention, attention_backward
from gptile.kernels.attention import CASES, attention_reference
from gptile.kernels.layer_norm import add_layer_norm_triton, layer_norm_triton


def packed(rows: int, tokens: int, heads: int, head_dim: int, spread: float = 1.5) -> Tensor:
    """A qkv projection with peaked scores and a mean that is not 0."""
    return torch.randn(rows, tokens, 3 * heads * head_dim) * spread + 0.3


def views(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.unflatten(2, (3, heads, -1)).unbind(2)


def truth(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """By the formula, in the precision of the arguments."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = scale * q @ k.transpose(-1, -2)
    n = scores.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def results(
    function: Callable, qkv: Tensor, dout: Tensor, heads: int, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output, and gradient of the packed projection split in three."""
    leaf = qkv.detach().clone().to(dtype).requires_grad_()
    out = function(*views(leaf, heads), scale)
    out.backward(dout.to(dtype))
    dq, dk, dv = views(leaf.grad, heads)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def wrong(
    module: ModuleType,
    qkv: Tensor,
    heads: int,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    dout_spread: float = 1.0,
) -> list[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    qkv = qkv.to(dtype)
    width = qkv.shape[2] // 3
    scale = (width // heads) ** -0.5 if scale is None else scale
    dout = (torch.randn(*qkv.shape[:2], width) * dout_spread).to(dtype)
    arguments = (qkv, dout, heads, scale)
    exact = results(truth, *arguments, torch.float64)
    reference = results(attention_reference, *arguments, dtype)
    ours = results(module.attention_triton, *arguments, dtype)

    def error(got: Tensor, expected: Tensor) -> float:
        return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-6)).item()

    floor = torch.finfo(dtype).eps
    return [
        name
        for name, expected in exact.items()
        if not error(ours[name], expected)
        <= (2 if name == "out" else 3) * error(reference[name], expected) + floor
    ]


def small(case: str) -> tuple[int, int, int, int]:
    """A case, cut to what the interpreter runs in a second."""
    shape = CASES[case]
    rows, heads = min(shape["rows"], 2), min(shape["heads"], 2)
    return rows, min(shape["tokens"], 150), heads, shape["head_dim"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype) -> None:
    shape = small(case)
    assert wrong(attention, packed(*shape), shape[2], dtype) == []


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_every_block_edge(tokens: int) -> None:
    assert wrong(attention, packed(1, tokens, 2, 16), 2) == []


def test_peaked_softmax_and_scores_beyond_fp16() -> None:
    qkv = packed(1, 40, 2, 32, spread=8.0)
    for dtype in (torch.float32, torch.float16):
        assert wrong(attention, qkv, 2, dtype) == []
        out = attention.attention_triton(*views((qkv * 20).to(dtype), 2), 1.0)
        assert out.isfinite().all()


def test_small_gradients_keep_their_digits_in_fp16() -> None:
    qkv = packed(1, 64, 2, 64)
    assert wrong(attention, qkv, 2, torch.float16, dout_spread=1e-4) == []


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale_is_honoured(scale: float) -> None:
    assert wrong(attention, packed(2, 20, 2, 16), 2, scale=scale) == []


@pytest.mark.parametrize("layout", ["packed", "heads first", "three tensors", "column-strided"])
def test_layouts(layout: str) -> None:
    q, k, v = views(packed(2, 33, 3, 24), 3)
    if layout == "heads first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "three tensors":
        q, k, v = q.contiguous(), k.transpose(1, 2).contiguous().transpose(1, 2), v.clone()
    if layout == "column-strided":
        q, k, v = (torch.stack([x, x * torch.nan], -1)[..., 0] for x in (q, k, v))
    got = attention.attention_triton(q, k, v, 0.2)
    torch.testing.assert_close(got, attention_reference(q, k, v, 0.2), rtol=1e-4, atol=1e-5)


def test_expanded_and_transposed_gradients() -> None:
    q, k, v = (x.detach().clone().requires_grad_() for x in views(packed(2, 20, 2, 16), 2))
    for reduce in (lambda out: out.sum(), lambda out: (out.transpose(0, 1) ** 2).sum()):
        gradients = []
        for function in (attention.attention_triton, attention_reference):
            gradients.append(torch.autograd.grad(reduce(function(q, k, v, 0.25)), (q, k, v)))
        for ours, reference in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-4)


def test_nothing_beyond_the_tensors_is_read() -> None:
    qkv = packed(1, 17, 2, 24)
    around = torch.full((3, 40, qkv.shape[2]), torch.nan)
    around[1, 10:27] = qkv[0]
    q, k, v = views(around[1:2, 10:27], 2)
    got = attention.attention_triton(q, k, v, 0.2)
    torch.testing.assert_close(got, attention.attention_triton(*views(qkv, 2), 0.2))


def test_gradients_are_the_same_bits_every_time() -> None:
    qkv, dout = packed(1, 70, 2, 16), torch.randn(1, 70, 32)
    arguments = (attention.attention_triton, qkv, dout, 2, 0.25, torch.float32)
    first, second = results(*arguments), results(*arguments)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_refusals_empty_input_and_dropout() -> None:
    q, k, v = views(packed(1, 6, 2, 16), 2)
    with pytest.raises(ValueError, match="k must be"):
        attention.attention_triton(q, k[:, :3], v, 1.0)
    with pytest.raises(TypeError, match="v is torch"):
        attention.attention_triton(q, k, v.half(), 1.0)
    with pytest.raises(ValueError, match="head_dim 129"):
        attention.attention_triton(*views(packed(1, 2, 1, 129), 1), 1.0)
    assert attention.attention_triton(*views(packed(0, 5, 2, 16), 2), 1.0).shape == (0, 5, 32)
    q, k, v = views(packed(1, 30, 2, 16), 2)
    torch.manual_seed(3)
    dropped = attention.attention_triton(q, k, v, 0.25, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped, attention_reference(q, k, v, 0.25, 0.5))


def test_opcheck_and_compile() -> None:
    q, k, v = (x.detach().clone().requires_grad_() for x in views(packed(1, 9, 2, 16), 2))
    torch.library.opcheck(torch.ops.gptile.attention.default, (q, k, v, 0.25))
    compiled = torch.compile(attention.attention_triton, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, 0.25), attention.attention_triton(q, k, v, 0.25))


def test_the_model_on_these_kernels_is_the_model(small_model: Callable) -> None:
    """Loss and every gradient, through attention and both LayerNorms."""
    model = small_model(n_embd=48, n_head=3, n_positions=64)
    ids, targets = torch.randint(61, (2, 2, 40)).unbind(0)
    kernels = Ops.torch().replace(
        attention=attention.attention_triton,
        layer_norm=layer_norm_triton,
        add_layer_norm=add_layer_norm_triton,
    )
    twin = type(model)(model.config, kernels).eval()
    twin.load_state_dict(model.state_dict())
    losses = [m(ids, targets, logits_for="none").loss for m in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), reference in zip(twin.named_parameters(), model.parameters(), strict=True):
        error = (ours.grad - reference.grad).norm() / reference.grad.norm()
        assert error < 1e-5, name


PLANTED = {
    "a glimpse of the future": (
        "<= positions[:, None], scores",
        "<= positions[:, None] + 1, scores",
    ),
    "its own key unseen": (
        "keys[None, :] <= positions[:, None], s",
        "(keys[None, :] < positions[:, None]) | (keys[None, :] == 0), s",
    ),
    "unscaled": ("input_precision=PRECISION) * scale", "input_precision=PRECISION)"),
    "head 0 for every head": (
        "k_base = slot * k_row_stride + head * k_head_stride",
        "k_base = slot * k_row_stride",
    ),
    "the sum not rescaled": ("total = total * shrink", "total = total"),
    "the output not rescaled": ("out = out * shrink[:, None]", "out = out"),
    "the last keys unseen": ("range(0, last, BLOCK_N)", "range(0, last - BLOCK_N, BLOCK_N)"),
    "log-sum-exp without its maximum": ("lse = maximum + tl.log(total)", "lse = tl.log(total)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    assert wrong(plant(attention, *PLANTED[fault]), packed(2, 70, 2, 24), 2)


PLANTED_BACKWARD = {
    "a glimpse of the future": (
        "(keys[None, :] <= queries[:, None]) &",
        "(keys[None, :] <= queries[:, None] + 1) &",
    ),
    "scores unscaled": ("input_precision=PRECISION) * scale", "input_precision=PRECISION)"),
    "delta forgotten": ("(dweights - delta[:, None])", "dweights"),
    "dq unscaled": ("(dq * scale)", "dq"),
    "dk unscaled": ("(dk * scale)", "dk"),
    "dk from the weights": ("dscores.to(q.dtype)), q", "weights.to(q.dtype)), q"),
    "dv from the gradients": ("weights.to(dout.dtype)), d", "dscores.to(dout.dtype)), d"),
    "early queries skipped": (
        "// BLOCK_M * BLOCK_M  # earlier",
        "// BLOCK_M * BLOCK_M + BLOCK_M  # earlier",
    ),
    "statistics of head 0": ("statistics = (row * n_head + head)", "statistics = (row * n_head)"),
}


@pytest.mark.parametrize("fault", PLANTED_BACKWARD)
def test_a_fault_planted_in_the_backward_pass_is_seen(
    plant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    planted = plant(attention_backward, *PLANTED_BACKWARD[fault])
    monkeypatch.setattr(attention, "launch_backward", planted.launch_backward)
    found = wrong(attention, packed(2, 70, 2, 24), 2)
    assert found
    assert "out" not in found
