"""The LayerNorm kernels in Triton's interpreter against fp64: values, gradients, layouts, traffic,
and proof that wrong kernels are seen."""

import itertools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gptile.kernels import layer_norm as kernels
from gptile.kernels.layer_norm import CASES, rows_per_program

EPS = 1e-5
# The interpreter runs a program after the other: enough rows to give some programs two.
MOST_ROWS = 6


def inputs(rows: int, cols: int, dtype: torch.dtype, mean: float = 2.0) -> list[Tensor]:
    """x, delta, weight, bias, dy, dsum: means far from 0, rows of different spread."""
    spread = torch.linspace(0.5, 3, rows).unsqueeze(1)
    x = torch.randn(rows, cols) * spread + mean
    delta, dy, dsum = torch.randn(3, rows, cols).unbind(0)
    weight, bias = torch.randn(2, cols).unbind(0)
    return [t.to(dtype) for t in (x, delta, weight + 1, bias, dy, dsum)]


def truth(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Sum and norm by the formula, in the precision of the arguments."""
    total = x if delta is None else x + delta
    centred = total - total.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return total, centred * rstd * weight + bias


def results(
    function: Callable, tensors: list[Tensor], dtype: torch.dtype, add: bool
) -> dict[str, Tensor]:
    """Outputs and gradients of ``function(x, delta | None, weight, bias) -> (sum, y)``."""
    x, delta, weight, bias = (t.detach().to(dtype).requires_grad_() for t in tensors[:4])
    dy, dsum = (t.to(dtype) for t in tensors[4:])
    total, y = function(x, delta if add else None, weight, bias)
    ((y * dy).sum() + ((total * dsum).sum() if add else 0)).backward()
    named = {"y": y, "dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}
    return named | ({"sum": total, "ddelta": delta.grad} if add else {})


def through(module: ModuleType) -> Callable:
    def run(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor) -> tuple:
        if delta is None:
            return x, module.layer_norm_triton(x, weight, bias, EPS)
        return module.add_layer_norm_triton(x, delta, weight, bias, EPS)

    return run


def pytorch(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor) -> tuple:
    if delta is None:
        return x, kernels.layer_norm_reference(x, weight, bias, EPS)
    return kernels.add_layer_norm_reference(x, delta, weight, bias, EPS)


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def wrong(module: ModuleType, tensors: list[Tensor], dtype: torch.dtype, add: bool) -> list[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    stored = [t.to(dtype).double() for t in tensors]
    exact = results(truth, stored, torch.float64, add)
    reference = results(pytorch, tensors, dtype, add)
    ours = results(through(module), tensors, dtype, add)
    floor = torch.finfo(dtype).eps
    return [
        name
        for name, expected in exact.items()
        if not error(ours[name], expected)
        <= (3 if name.startswith("d") else 2) * error(reference[name], expected) + floor
    ]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype, add: bool) -> None:
    rows, cols = min(CASES[case]["rows"], MOST_ROWS), CASES[case]["cols"]
    tensors = inputs(rows, cols, dtype)
    if cols == 1:  # nothing varies: y is the bias, and the gradient of x is that of the sum
        got = results(through(kernels), tensors, dtype, add)
        assert torch.equal(got["y"], tensors[3].expand(rows, 1))
        assert torch.equal(got["dx"], tensors[5] if add else torch.zeros(rows, 1, dtype=dtype))
    else:
        assert wrong(kernels, tensors, dtype, add) == []


@pytest.mark.parametrize("rows", [255, 257, 600])
def test_programs_that_own_several_rows(rows: int) -> None:
    assert (rows_per_program(rows) > 1) == (rows > 256)
    assert wrong(kernels, inputs(rows, 8, torch.float32), torch.float32, True) == []


@pytest.mark.parametrize(
    ("mean", "first"), [(0, -1.3416), (100, -1.3415), (1000, -1.3415), (10000, -1.3313)]
)
def test_a_large_mean_does_not_cancel(mean: float, first: float) -> None:
    row = (mean + torch.arange(16, dtype=torch.float64) * 1e-3).float().unsqueeze(0)
    y = kernels.layer_norm_triton(row, torch.ones(16), torch.zeros(16), EPS)
    assert y[0, 0].item() == pytest.approx(first, abs=2e-4)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "column-strided": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], -1)[..., 0],
    "row-strided": lambda t: torch.cat([t, t.new_full(t.shape, torch.nan)], 1)[:, : t.shape[1]],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize(("x", "dy"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_layouts_of_input_and_gradient(x: str, dy: str) -> None:
    tensors = inputs(4, 24, torch.float32)
    tensors[0], tensors[1] = LAYOUTS[x](tensors[0]), LAYOUTS[x](tensors[1])
    tensors[4], tensors[5] = LAYOUTS[dy](tensors[4]), LAYOUTS[dy](tensors[5])
    for add in (False, True):
        assert wrong(kernels, tensors, torch.float32, add) == []


def test_three_dimensions_and_a_summed_gradient() -> None:
    x = torch.randn(2, 3, 24, requires_grad=True)
    weight, bias = torch.randn(2, 24).unbind(0)
    kernels.layer_norm_triton(x, weight, bias, EPS).sum().backward()  # a stride-0 gradient
    ours = x.grad.clone()
    x.grad = None
    kernels.layer_norm_reference(x, weight, bias, EPS).sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("used", ["sum", "norm"])
def test_gradient_where_only_one_output_is_used(used: str) -> None:
    x, delta, weight, bias, dy, _ = inputs(4, 24, torch.float32)
    gradients = []
    for function in (kernels.add_layer_norm_triton, kernels.add_layer_norm_reference):
        leaves = [t.clone().requires_grad_() for t in (x, delta, weight, bias)]
        total, y = function(*leaves, EPS)
        ((total if used == "sum" else y) * dy).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, reference in zip(*gradients, strict=True):
        assert (ours is None) == (reference is None)
        if reference is not None:
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, delta, weight, bias, *_ = inputs(4, 24, torch.float32)
    with pytest.raises(ValueError, match="weight must be"):
        kernels.layer_norm_triton(x, weight[:3], bias, EPS)
    with pytest.raises(ValueError, match="delta must be"):
        kernels.add_layer_norm_triton(x, delta[:1], weight, bias, EPS)


def test_no_rows() -> None:
    x = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    y = kernels.layer_norm_triton(x, weight, torch.zeros(8), EPS)
    y.sum().backward()
    assert y.shape == (0, 8)
    assert not weight.grad.any()


def test_gradients_are_the_same_bits_every_time() -> None:
    tensors = inputs(300, 16, torch.float32)
    first, second = (results(through(kernels), tensors, torch.float32, True) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_too_wide_and_twice_differentiated_are_refused() -> None:
    with pytest.raises(ValueError, match="16384"):
        kernels.layer_norm_triton(torch.zeros(1, 16385), *torch.zeros(2, 16385).unbind(0), EPS)
    x = torch.randn(2, 8, requires_grad=True)
    y = kernels.layer_norm_triton(x, torch.ones(8), torch.zeros(8), EPS)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_what_a_kernel_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(TypeError, match="float64"):
        kernels.layer_norm_triton(x.double(), weight.double(), weight.double(), EPS)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(TypeError, match="TRITON_INTERPRET=1"):
        kernels.layer_norm_triton(x, weight, weight, EPS)


def test_opcheck_and_compile() -> None:
    x, delta, weight, bias, *_ = (t.requires_grad_() for t in inputs(3, 24, torch.float32))
    torch.library.opcheck(torch.ops.gptile.layer_norm.default, (x, weight, bias, EPS))
    torch.library.opcheck(torch.ops.gptile.add_layer_norm.default, (x, delta, weight, bias, EPS))
    compiled = torch.compile(through(kernels), backend="aot_eager", fullgraph=True)
    for given in (None, delta):
        for got, expected in zip(
            compiled(x, given, weight, bias), through(kernels)(x, given, weight, bias), strict=True
        ):
            assert torch.equal(got, expected)


PLANTED = {
    "padding counts in the variance": ("tl.where(mask, x - mean, 0.0)  #", "x - mean  #"),
    "single-pass variance": (
        "tl.sum(centred * centred, axis=0) / n_cols",
        "tl.sum(x * x, axis=0) / n_cols - mean * mean",
    ),
    "epsilon outside the root": ("tl.sqrt(variance + eps)", "(tl.sqrt(variance) + eps)"),
    "the last column lost": ("mask = cols < n_cols\n    x =", "mask = cols < n_cols - 1\n    x ="),
    "x normalised without delta": ("        x = total.to(tl.float32)\n", ""),
    "the row stride of x taken for delta's": ("row * delta_row_stride", "row * x_row_stride"),
    "no mean term in dx": ("scaled - along_ones - normed", "scaled - normed"),
    "gradient of the sum forgotten": ("dx += dsum.to(tl.float32)", "dx += 0"),
    "shares overwrite each other": ("dweight_ptr + program * n_cols", "dweight_ptr + 0 * n_cols"),
    "the last share lost": ("rows[:, None] < n_programs", "rows[:, None] < n_programs - 1"),
    "a row read twice": ("first = program * run", "first = tl.maximum(program * run - 1, 0)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    module = plant(kernels, *PLANTED[fault])
    tensors = inputs(6, 17, torch.float32, mean=50.0)
    tensors[1] = LAYOUTS["row-strided"](tensors[1])
    assert wrong(module, tensors, torch.float32, True)
