"""The kernels for 1 to 16 rows in Triton's interpreter against fp64: every combination of what they
fuse, int8 weights, layouts, and proof that wrong kernels are seen."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.kernels import small_linear
from gptile.kernels.activations import ACTIVATIONS
from gptile.kernels.small_linear import CASES, MAX_ROWS, quantize_weight, small_linear_reference

EPS = 1e-5


def problem(
    rows: int,
    n_in: int,
    n_out: int,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = False,
    residual: bool = False,
    activation: str | None = None,
    int8: bool = False,
    mean: float = 2.0,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    x = torch.randn(rows, n_in) * torch.linspace(0.5, 3, rows).unsqueeze(1) + mean
    weight, scales = (torch.randn(n_out, n_in) / n_in**0.5).to(dtype), None
    if int8:
        weight, scales = quantize_weight(weight)
    norm_weight, norm_bias = (torch.randn(2, n_in) + 1).to(dtype).unbind(0)
    keywords = {
        "scales": scales,
        "norm": (norm_weight, norm_bias, EPS) if norm else None,
        "activation": activation,
        "residual": torch.randn(rows, n_out).to(dtype) if residual else None,
    }
    return (x.to(dtype), weight, torch.randn(n_out).to(dtype)), keywords


def truth(x: Tensor, weight: Tensor, bias: Tensor | None, **k: Any) -> Tensor:
    """By the formula in fp64."""
    x = x.double()
    if k["norm"] is not None:
        norm_weight, norm_bias, eps = k["norm"]
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        x = x * norm_weight.double() + norm_bias.double()
    weight = weight.double()
    if k["scales"] is not None:
        weight = weight * k["scales"].double().unsqueeze(1)
    y = x @ weight.T
    if bias is not None:
        y = y + bias.double()
    function = None if k["activation"] is None else ACTIVATIONS[k["activation"]]
    if function == "erf":
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    if function == "tanh":
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    if function == "relu":
        y = y.clamp(min=0)
    if function == "silu":
        y = y / (1 + torch.exp(-y))
    return y if k["residual"] is None else k["residual"].double() + y


def wrong(module: ModuleType, args: tuple[Tensor, ...], keywords: dict[str, Any]) -> bool:
    """Whether the result is further from fp64 than twice PyTorch's own error; where there are few
    numbers, four times: whether PyTorch is nearly exact on those is luck."""
    exact = truth(*args, **keywords)

    def error(got: Tensor) -> float:
        return ((got.double() - exact).norm() / exact.norm()).item()

    ratio = 4 if exact.numel() < 32 else 2
    theirs = error(small_linear_reference(*args, **keywords))
    allowed = ratio * theirs + torch.finfo(args[0].dtype).eps
    return not error(module.small_linear_triton(*args, **keywords)) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype) -> None:
    shape = dict(CASES[case])
    rows, n_in, n_out = shape.pop("few"), shape.pop("in"), shape.pop("out")
    assert not wrong(small_linear, *problem(rows, n_in, min(n_out, 90), dtype, **shape))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("norm", "residual", "int8"), [*itertools.product([False, True], repeat=3)]
)
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_new", "relu", "silu"])
def test_every_combination(
    rows: int, norm: bool, residual: bool, int8: bool, activation: str | None
) -> None:
    args, keywords = problem(
        rows, 40, 21, norm=norm, residual=residual, int8=int8, activation=activation
    )
    assert not wrong(small_linear, args, keywords)
    x, weight, _ = args
    assert not wrong(small_linear, (x, weight, None), keywords)


@pytest.mark.parametrize("rows", [1, 2, 15, 16])
@pytest.mark.parametrize("n_in", [1, 16, 127, 128, 129, 257])
@pytest.mark.parametrize("n_out", [1, 15, 16, 17, 33])
def test_sizes_around_every_block_edge(rows: int, n_in: int, n_out: int) -> None:
    assert not wrong(small_linear, *problem(rows, n_in, n_out, norm=n_in > 1))


def first_normed(module: ModuleType, mean: float, rows: int) -> float:
    """Of sixteen values in steps of a thousandth (cases of a variance that cancels)."""
    row = (mean + torch.arange(16, dtype=torch.float64) * 1e-3).float()
    norm = (torch.ones(16), torch.zeros(16), EPS)
    return module.small_linear_triton(row.expand(rows, 16), torch.eye(16), norm=norm)[0, 0].item()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("mean", "first"), [(0, -1.3416), (100, -1.3415), (1000, -1.3415), (10000, -1.3313)]
)
def test_a_large_mean_does_not_cancel(rows: int, mean: float, first: float) -> None:
    assert first_normed(small_linear, mean, rows) == pytest.approx(first, abs=2e-4)


@pytest.mark.parametrize("wrong_text", ["- mean[:, None] + rest[:, None]", "- mean[:, None]"])
def test_a_mean_that_is_not_corrected_is_seen(
    plant: Callable[..., ModuleType], wrong_text: str
) -> None:
    planted = plant(small_linear, "- mean[:, None] - rest[:, None]", wrong_text)
    assert first_normed(planted, 10000, 2) != pytest.approx(-1.3313, abs=2e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_strided_tensors_and_nothing_around_them_is_read(rows: int) -> None:
    (x, weight, bias), keywords = problem(rows, 24, 10, norm=True, residual=True)
    expected = small_linear.small_linear_triton(x, weight, bias, **keywords)

    def inside(t: Tensor) -> Tensor:
        around = t.new_full((t.shape[0] + 2, t.shape[1] + 5), torch.nan)
        around[1:-1, 2 : 2 + t.shape[1]] = t
        return around[1:-1, 2 : 2 + t.shape[1]]

    keywords["residual"] = inside(keywords["residual"])
    got = small_linear.small_linear_triton(inside(x), inside(weight), bias, **keywords)
    assert torch.equal(got, expected)
    transposed = weight.T.contiguous().T
    spread = torch.stack([x, x * torch.nan], -1)[..., 0]
    got = small_linear.small_linear_triton(spread, transposed, bias, **keywords)
    assert torch.equal(got, expected)


def test_leading_dimensions() -> None:
    (x, weight, bias), keywords = problem(6, 24, 10, residual=True)
    flat = small_linear.small_linear_triton(x, weight, bias, **keywords)
    keywords["residual"] = keywords["residual"].view(2, 3, 10)
    got = small_linear.small_linear_triton(x.view(2, 3, 24), weight, bias, **keywords)
    assert torch.equal(got, flat.view(2, 3, 10))


def test_quantisation_is_within_half_a_step() -> None:
    weight = torch.randn(7, 50)
    weight[3] = 0
    quantised, scales = quantize_weight(weight)
    assert quantised.dtype == torch.int8
    assert quantised.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    rebuilt = quantised.double() * scales.double().unsqueeze(1)
    assert ((rebuilt - weight).abs() <= 0.5001 * scales.unsqueeze(1)).all()


def test_refusals_and_no_rows() -> None:
    (x, weight, bias), _ = problem(MAX_ROWS + 1, 8, 4)
    with pytest.raises(ValueError, match="17 rows"):
        small_linear.small_linear_triton(x, weight, bias)
    with pytest.raises(TypeError, match="scales"):
        small_linear.small_linear_triton(x[:1], weight, bias, scales=torch.ones(4))
    with pytest.raises(TypeError, match="int8"):
        small_linear.small_linear_triton(x[:1], weight.to(torch.int8), bias)
    assert small_linear.small_linear_triton(x[:0], weight, bias).shape == (0, 4)


@pytest.mark.parametrize("rows", [1, 3])
def test_operands_that_do_not_fit_are_refused(rows: int) -> None:
    (x, weight, bias), keywords = problem(rows, 24, 10, norm=True, residual=True)
    ours, norm, residual = small_linear.small_linear_triton, keywords["norm"], keywords["residual"]
    with pytest.raises(ValueError, match="weight must be"):
        ours(x[:, :20], weight, bias)
    with pytest.raises(ValueError, match=r"bias must be \[10\], got \[3\]"):
        ours(x, weight, bias[:3])
    with pytest.raises(ValueError, match="norm_bias must be"):
        ours(x, weight, bias, norm=(norm[0], norm[1][:5], EPS))
    with pytest.raises(ValueError, match="residual must be"):
        ours(x, weight, bias, residual=residual[:, :1])
    with pytest.raises(TypeError, match="residual is torch"):
        ours(x.half(), weight.half(), bias.half(), residual=residual)
    quantised, scales = quantize_weight(weight)
    with pytest.raises(ValueError, match="scales must be"):
        ours(x, quantised, bias, scales=scales[:2])


def test_a_damaged_weight_shows_through_quantisation() -> None:
    weight = torch.randn(3, 8)
    weight[1, 2] = torch.nan
    quantised, scales = quantize_weight(weight)
    y = small_linear.small_linear_triton(torch.randn(1, 8), quantised, scales=scales)
    assert y.isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("rows", [1, 3])
def test_opcheck_and_compile(rows: int) -> None:
    args, keywords = problem(rows, 24, 10, norm=True, residual=True, activation="gelu_new")
    flat = (args[0], args[1], None, args[2], *keywords["norm"], "gelu_new", keywords["residual"])
    torch.library.opcheck(torch.ops.gptile.small_linear.default, flat)
    ours = small_linear.small_linear_triton
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args, **keywords), ours(*args, **keywords))


RESIDUAL = """    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + outs, mask=mask, other=0.0).to(tl.float32)
"""
ACTIVATE = "    y = activate(y, FUNCTION)\n"
BLOCKS = "for first in range(0, n_in, BLOCK_K):\n        ins = first + tl.arange(0, BLOCK_K)\n"
ROW_FAULTS = {
    "padding counts in the variance": (
        "centred = tl.where(mask, centred - tl.sum(centred, axis=0) / n_in, 0.0)",
        "centred = x - tl.sum(x, axis=0) / n_in",
    ),
    "the norm's bias forgotten": ("* norm_weight + norm_bias", "* norm_weight"),
    "epsilon outside the root": ("/ n_in + eps)", "/ n_in) + eps"),
    "the last input lost": ("mask = ins < n_in\n    weight", "mask = ins < n_in - 1\n    weight"),
    "the first rows for all": ("outs = tl.program_id(0).to(tl.int64) * BLOCK_N", "outs = 0"),
    "unscaled": ("y *= tl.load(scales_ptr", "y *= 1.0 + 0.0 * tl.load(scales_ptr"),
    "the activation after the residual": (ACTIVATE + RESIDUAL, RESIDUAL + ACTIVATE),
}
ROWS_FAULTS = {
    "mean of the last block only": ("mean += tl.sum(load_tile", "mean = tl.sum(load_tile"),
    "padding counts in the variance": (
        "tl.where(ins[None, :] < n_in, x - mean[:, None], 0.0)",
        "x - mean[:, None]",
    ),
    "x not normalised": ("            x = normed.to(x.dtype)\n", ""),
    "the last block lost": (
        BLOCKS + "        weight",
        BLOCKS.replace("n_in,", "n_in - BLOCK_K,") + "        weight",
    ),
    "row 0 for every row": (
        "x = load_tile(x_ptr, x_row_stride, rows, ins, n_rows, n_in, FP32)",
        "x = load_tile(x_ptr, 0, rows, ins, n_rows, n_in, FP32)",
    ),
    "unscaled": ("other=0.0)[None, :]\n    if", "other=0.0)[None, :] * 0 + 1\n    if"),
}


@pytest.mark.parametrize(
    ("rows", "fault"), [*((1, f) for f in ROW_FAULTS), *((3, f) for f in ROWS_FAULTS)]
)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], rows: int, fault: str) -> None:
    module = plant(small_linear, *(ROW_FAULTS if rows == 1 else ROWS_FAULTS)[fault])
    fused = {"norm": True, "residual": True, "activation": "gelu_new", "int8": True}
    # At the larger mean its rounding matters, at the smaller one epsilon does.
    assert any(wrong(module, *problem(rows, 259, 40, **fused, mean=mean)) for mean in (3.0, 3e3))
